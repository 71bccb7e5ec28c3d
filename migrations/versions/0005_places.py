"""Partitions that tell how far their jobs are done, and the further places of a job.

Locks: none that another session waits for; all tables are new.
"""

from __future__ import annotations

from alembic import op

revision = "0005_places"
down_revision = "0004_jobs"
branch_labels = None
depends_on = None

UPGRADE = """
-- Partitions whose consumer tells how far their jobs are done. A job names its
-- partition by this short number.
create table sources (
    id int generated always as identity primary key,
    consumer_group text collate "C" not null,
    topic text collate "C" not null,
    partition int not null,
    unique (consumer_group, topic, partition)
);

-- Places that a job has beside its own: of a job that it has superseded, of a record in
-- whose handling it was found by its unique key, and its own after it was discarded. A
-- row counts until its job is in none of `jobs` and `discarded`; then it is deleted. No
-- job's row is changed instead: its owner may be about to delete it.
create table kept_places (
    source int not null,
    record_offset bigint not null,
    job_id bigint not null,
    -- Of the job.
    origin text collate "C" not null
) with (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_cost_delay = 0
);
create index kept_places_of_source on kept_places (source, record_offset);
create index kept_places_of_job on kept_places (job_id);
-- Rows have no key, and a publication may contain the table.
alter table kept_places replica identity full;

-- The places of jobs whose handler enqueues another, one for each partition. They are
-- named as in 'job flights/3:4711', and a handler of a batch names several. It is
-- planned once: to plan it at each call takes longer than all the rest.
create function places_of(place text)
returns table (source int, record_offset bigint)
language plpgsql stable set plan_cache_mode = 'force_generic_plan' as $function$
#variable_conflict use_column
begin
    return query
    select p.source, min(p.record_offset)
    from unnest((string_to_array(place, ' '))[2:]) as h(holder)
    cross join lateral (
        -- `offset 0`: one index look-up each, whatever the statistics say.
        (
            select j.source, j.record_offset from jobs j
            where j.origin = split_part(h.holder, ':', 1)
                and j.id = split_part(h.holder, ':', 2)::bigint and j.source is not null
            offset 0
        )
        union all
        (
            select k.source, k.record_offset from kept_places k
            where k.job_id = split_part(h.holder, ':', 2)::bigint
            offset 0
        )
    ) p
    group by p.source
    order by p.source;
end
$function$;

-- Lets a job keep one more place, unless it has an earlier one of the same partition.
create function keep_place(
    job_id bigint, origin text, source int, record_offset bigint
) returns void language plpgsql as $function$
#variable_conflict use_column
begin
    insert into kept_places (source, record_offset, job_id, origin)
    select keep_place.source, keep_place.record_offset, keep_place.job_id,
        keep_place.origin
    where not exists (
        select from kept_places k
        where k.job_id = keep_place.job_id and k.source = keep_place.source
            and k.record_offset <= keep_place.record_offset
    ) and not exists (
        select from jobs j
        where j.origin = keep_place.origin and j.id = keep_place.job_id
            and j.source = keep_place.source
            and j.record_offset <= keep_place.record_offset
    );
end
$function$;
"""

DOWNGRADE = """
drop function keep_place, places_of;
drop table kept_places, sources;
"""


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
