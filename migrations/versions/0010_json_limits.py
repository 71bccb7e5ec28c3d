"""What JSON may be, so that Python can read it again.

Locks: none that another session waits for; only functions are made.
"""

from __future__ import annotations

from alembic import op

revision = "0010_json_limits"
down_revision = "0009_ordering"
branch_labels = None
depends_on = None

UPGRADE = """
-- Refuses values that Python cannot read: more than 200 levels, and integers of more
-- than 4,300 digits. jobs_lib.schemas.json_limits has the same limits.
create function check_json(what text, value jsonb, size int) returns void
language plpgsql immutable as $function$
declare
    there int := 200;
    missing int := size;
    middle int;
    digits int;
begin
    -- The fixed path first: the server keeps it, and it costs 2 ms for a megabyte.
    if jsonb_path_exists(
        value, 'strict $.**{200} ? (@.type() == "array" || @.type() == "object")'
    ) then
        while there + 1 < missing loop
            middle := (there + missing) / 2;
            if jsonb_path_exists(value, format(
                'strict $.**{%s} ? (@.type() == "array" || @.type() == "object")',
                middle
            )::jsonpath) then
                there := middle;
            else
                missing := middle;
            end if;
        end loop;
        raise exception '% has % levels, and at most 200 can be read again',
            what, there + 1
            using errcode = 'invalid_parameter_value',
                hint = 'Send what lies deep as a string of JSON, or as a flat list.';
    end if;
    if size > 4300 then
        digits := length(split_part(ltrim(jsonb_path_query_first(
            value, 'strict $.** ? (@.type() == "number"
                && (@ >= 1e4300 || @ <= -1e4300))'
        ) #>> '{}', '-'), '.', 1));
        if digits > 4300 then
            raise exception
                '% holds a number of % digits, and at most 4300 can be read again',
                what, digits
                using errcode = 'invalid_parameter_value', hint = 'Send a string.';
        end if;
    end if;
end
$function$;
"""

DOWNGRADE = """
drop function check_json;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
