-- Figures for the metrics: the cost of each does not grow with the number of rows.

-- name: count_pages
select c.relname, pg_relation_size(c.oid) / current_setting('block_size')::bigint
from pg_class c
where c.relnamespace = %(schema)s::text::regnamespace
    and c.relname in ('jobs', 'discarded', 'outbox', 'holds', 'skipped')

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

-- name: sample_skipped
select s.consumer_group, s.topic, count(*)
from {schema}.skipped s tablesample system (%(percent)s)
where s.consumer_group = any (%(groups)s::text[])
group by s.consumer_group, s.topic

-- name: measure_offsets
-- Read all rows, since a sample would miss the one partition that stands still. There is
-- one row for each partition of a group, however many records go through it.
select consumer_group, topic,
    extract(epoch from clock_timestamp() - max(appended_at))::float8,
    count(*) filter (where {stands_still})
from (select o.* from {schema}.offsets o where {is_of_topic}) offsets
where consumer_group = any (%(groups)s::text[])
group by consumer_group, topic

-- name: list_blocked
-- More than a hundred partitions would be too many labels.
select consumer_group, topic, partition, failed_offset,
    extract(epoch from clock_timestamp() - failing_since)::float8
from (select o.* from {schema}.offsets o where {is_of_topic}) offsets
where consumer_group = any (%(groups)s::text[]) and {stands_still}
order by failing_since, consumer_group, topic, partition limit 100
