"""An end and a state of equal version: the captured change, and what read models keep.

Locks: `gone_keys` against consumers for the moment in which a column is added; it takes
no rewrite.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op
from alembic.script import ScriptDirectory

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

UPGRADE = r"""
-- Whether the state that the end has removed had the end's own version. Else a state of
-- that version is a newer one: of a key that came back.
alter table gone_keys add column of_equal boolean not null default false;

-- The trigger of a table whose changes are sent: topic, entity, key column, and the
-- version's column, which triggers of older releases do not name.
create or replace function capture_change() returns trigger
language plpgsql as $function$
declare
    was jsonb := case when tg_op <> 'INSERT' then to_jsonb(old) end;
    is_now jsonb := case when tg_op <> 'DELETE' then to_jsonb(new) end;
    before text := was ->> tg_argv[2];
    after text := is_now ->> tg_argv[2];
    version_column text := coalesce(tg_argv[3], 'version');
    last_version text := was ->> version_column;
    end_version text := is_now ->> version_column;
begin
    if tg_op = 'UPDATE' and before is distinct from after then
        -- Without the keys: the text goes into logs, and they are their owner's.
        raise exception 'the key % of % was to become another',
            quote_ident(tg_argv[2]), tg_relid::regclass
            using errcode = 'integrity_constraint_violation', hint =
                'One entity has one key for ever: delete it and insert another.';
    end if;
    -- Of each change: an updated row may be gone when its record leaves, or be one that
    -- the entity's function leaves out. Its version is the change's own, and follows
    -- the row's last one where the change has none. A column of that name may hold
    -- anything else, which must not cost the caller's change.
    if tg_op = 'DELETE' or last_version = end_version then
        end_version := null;
        if last_version ~ '^-?[0-9]{1,19}$'
            and last_version::numeric >= -9223372036854775808
            and last_version::numeric < 9223372036854775807
        then
            end_version := last_version::bigint + 1;
        end if;
    elsif end_version !~ '^-?[0-9]{1,19}$'
        or end_version::numeric not between -9223372036854775808 and 9223372036854775807
    then
        end_version := null;
    end if;
    perform send_current(
        tg_argv[0], coalesce(after, before), tg_argv[1], end_version::bigint
    );
    return null;
end
$function$;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute("alter table gone_keys drop column of_equal")
    here = ScriptDirectory(str(Path(__file__).parents[1]))
    earlier = here.get_revision("0026").module.UPGRADE
    capture = earlier[earlier.index("create or replace function capture_change") :]
    op.execute(capture)
