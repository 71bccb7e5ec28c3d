-- Find the rows that were committed late, behind a cursor. Reads only.

-- name: sweep
-- Rows behind the cursor that are available and not in flight: committed late, or heads of
-- waiting groups (the claim sorts those out). Reads only, a slice at a time. The rows in
-- flight are left out after the limit, which allows for them: inside, the condition would
-- turn the walk along the index into a sort of all rows behind the cursor.
with slice as materialized (
    select o.origin, s.* from unnest(
        %(origins)s::text[], %(starts)s::bigint[], %(ends)s::bigint[],
        %(highs)s::bigint[], %(batches)s::bigint[]
    ) as o(origin, start, "end", high, batch)
    cross join lateral (
        select j.id, j."group", j.type {read_opened} from {schema}.jobs j
        where j.origin = o.origin and j.id > o.start and j.id <= o."end"
            and j.state = 'available'
            -- A row that its own priority's windows have not reached is not late.
            and (j.priority = 0 or j.id <= case j.priority when 1 then o.high else o.batch end)
            and j.type = any (%(types)s::text[])
        order by j.id desc limit %(limit)s
    ) s
)
select s.origin, s.id, s."group", null::int as count
from slice s
left join unnest(%(busy_origins)s::text[], %(busy_groups)s::text[])
    as busy(origin, "group") using (origin, "group")
where not exists (select from unnest(%(flying)s::bigint[]) as f(id) where f.id = s.id)
    {late_if_opened}
    -- A row behind another row of its group comes with that one. But a lane in flight
    -- does not look back. This probes the nearest row before it: further up there may be
    -- thousands of ended rows, as long as an old snapshot is held.
    and case when s."group" is not null and busy.origin is null then (
        select j.id from {schema}.jobs j
        where j.origin = s.origin and (j."group", j.id) < (s."group", s.id)
            and j."group" >= s."group"
        order by j."group" desc, j.id desc limit 1
    ) is null
        -- Or a failed one gives way to it: see `yields`. It is the first one after that
        -- of the same type, so each row between the two is walked over for it alone.
        or s.type = any (%(last_types)s::text[]) and exists (
            select from (
                select j.state, j.attempt from {schema}.jobs j
                where j.origin = s.origin and (j."group", j.id) < (s."group", s.id)
                    and j."group" >= s."group" and j.type = s.type
                order by j."group" desc, j.id desc limit 1
            ) before
            where before.state = 'scheduled' and before.attempt > 0
        )
        else true end
union all
-- How far it went.
select s.origin, min(s.id), null, count(*)::int from slice s group by s.origin
union all
-- How long it took the server, in microseconds. The network's time, and the time for which
-- the answer is not read, cost nothing.
select null, (extract(epoch from clock_timestamp() - statement_timestamp()) * 1e6)::bigint,
    null, null

-- name: horizon
-- Once every transaction that was open at `xmax` has ended, nothing with an id drawn
-- before it can still appear.
select pg_snapshot_xmin(s)::text::bigint as oldest,
    pg_snapshot_xmax(s)::text::bigint as following,
    array(select running::text::bigint from pg_snapshot_xip(s) as running) as running
from pg_current_snapshot() s
