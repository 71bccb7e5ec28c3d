-- Figures for the metrics: the cost of each does not grow with the number of rows.

-- name: count_pages
select c.relname, pg_relation_size(c.oid) / current_setting('block_size')::bigint
from pg_class c
where c.relnamespace = %(schema)s::text::regnamespace
    and c.relname in ('jobs', 'discarded', 'outbox', 'holds')

-- name: sample_jobs
-- Read a random share of the pages; all pages of small tables. More than a hundred types
-- would be too many labels.
select j.type, j.state, count(*),
    extract(epoch from clock_timestamp() - min(coalesce(j.run_at, j.enqueued_at))
        filter (where j.state = 'available'))::float8
from {schema}.jobs j tablesample system (%(percent)s)
group by j.type, j.state order by count(*) desc limit 100

-- name: sample_discarded
select count(*) from {schema}.discarded tablesample system (%(percent)s)

-- name: sample_outbox
select count(*), extract(epoch from clock_timestamp() - min(o.created_at))::float8
from {schema}.outbox o tablesample system (%(percent)s)

-- name: sample_holds
select count(*) from {schema}.holds tablesample system (%(percent)s)
