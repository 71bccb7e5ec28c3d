-- Write the outcomes of jobs: completed, retried, discarded.
--
-- Every statement that changes a job row first reads the rows of `origins` `for share`,
-- with owner and epoch. A take-over locks them for update, so a stale owner changes
-- nothing.

-- part: fence
    select o.origin from {schema}.origins o
    join unnest(%(owned)s::text[], %(epochs)s::bigint[]) as mine(origin, epoch) using (origin)
    where o.role = %(role)s and o.owner = %(owner)s and o.epoch = mine.epoch
    order by o.origin
    for share of o

-- part: note
    -- Ended jobs go into the history, if their type keeps one.
    insert into {schema}.history
        (keep_until, id, origin, type, "group", outcome, attempt, enqueued_at)
    select (clock_timestamp() at time zone 'UTC')::date + k.days,
        e.id, e.origin, e.type, e."group", e.outcome, e.attempt, e.enqueued_at
    from ended e
    join unnest(%(types)s::text[], %(keep)s::int[]) as k(type, days) using (type)

-- name: complete
with own as materialized ({fence}),
done as materialized (
    select * from unnest(%(origins)s::text[], %(ids)s::bigint[]) as d(origin, id)
    where d.origin in (select origin from own)
),
-- Look first at the places where the claim found the rows: rows in flight hardly ever
-- move. If a row is no longer there, or another row is there now, the index finds it.
found as materialized (
    select j.ctid as at, j.origin, j.id from {schema}.jobs j
    where j.ctid = any (%(places)s::tid[])
),
ended as (
    delete from {schema}.jobs where ctid = any (array(
        -- `is true` keeps these from becoming joins: with the statistics of an emptied
        -- table they would compare each row with each.
        select found.at from found where (found.id in (select done.id from done)) is true
        union all
        -- One index look-up for each row, even with the statistics of an emptied table.
        select row.ctid from done
        cross join lateral (
            select j.ctid from {schema}.jobs j
            where j.origin = done.origin and j.id = done.id offset 0
        ) row
        where (done.id in (select found.id from found)) is not true
    ))
    returning id, origin, type, "group", attempt + crashes + 1 as attempt, enqueued_at,
        'completed' as outcome
),
noted as ({note})
select id from ended

-- name: remove
-- Jobs that end without a run: superseded by a later one of their group, or cancelled.
with own as materialized ({fence}),
done as materialized (
    select * from unnest(%(origins)s::text[], %(ids)s::bigint[]) as d(origin, id)
    where d.origin in (select origin from own)
),
removed as (
    delete from {schema}.jobs where ctid = any (array(
        select row.ctid from done
        cross join lateral (
            select j.ctid from {schema}.jobs j
            where j.origin = done.origin and j.id = done.id offset 0
        ) row
    ))
    returning id, origin, type, "group", attempt + crashes as attempt, enqueued_at, source,
        record_offset
),
-- A scheduled row moves if it is retried or becomes due at this moment. PostgreSQL then
-- deletes nothing at its old place, and the job would run behind the one that has
-- superseded it. By its id the row is found where it is now.
moved as (
    delete from {schema}.jobs j
    where j.origin = any (array(select origin from own)) and j.id = any (array(
        select done.id from done where (done.id in (select removed.id from removed)) is not true
    ))
    returning id, origin, type, "group", attempt + crashes as attempt, enqueued_at, source,
        record_offset
),
ended as (
    select *, %(outcome)s::text as outcome
    from (select * from removed union all select * from moved) gone
),
asked as (
    delete from {schema}.cancellations where id in (select id from ended)
),
replaced as (
    select e.*, r.by from ended e
    join unnest(%(ids)s::bigint[], %(by)s::bigint[]) as r(id, by) using (id)
    where r.by is not null
),
-- What stands in for others is not done before their records are.
kept as (
    insert into {schema}.kept_places (source, record_offset, job_id, origin)
    select r.source, min(r.record_offset), r.by, r.origin from replaced r
    where r.source is not null group by r.source, r.by, r.origin
),
passed_on as (
    update {schema}.kept_places k set job_id = r.by from replaced r where k.job_id = r.id
),
noted as ({note})
select id from ended

-- name: retry
-- Schedule a failed job for later, with its error; the rest of its group waits behind it.
-- A snoozed or released job likewise, but that costs no attempt.
with own as materialized ({fence}),
failed as materialized (
    -- After a failure its earlier crashes count as attempts, too.
    select row.ctid as at, d.delay, d.until, d.error, d.trace, d.failed,
        row.attempt + d.burnt + case when d.failed then row.crashes else 0 end as attempt
    from unnest(
        %(origins)s::text[], %(ids)s::bigint[], %(delays)s::float8[],
        %(untils)s::timestamptz[], %(failures)s::text[], %(traces)s::text[],
        %(failed)s::bool[], %(burnt)s::int[], %(counted)s::int[]
    ) as d(origin, id, delay, until, error, trace, failed, burnt, counted)
    cross join lateral (
        select j.ctid, j.attempt, j.crashes from {schema}.jobs j
        where j.origin = d.origin and j.id = d.id offset 0
    ) row
    where d.origin in (select origin from own)
        -- If it is sent again after a lost answer, the attempt must not count twice.
        and row.attempt + row.crashes = d.counted
)
update {schema}.jobs j set
    state = 'scheduled',
    attempt = failed.attempt,
    crashes = case when failed.failed then 0 else j.crashes end,
    run_at = coalesce(
        failed.until, clock_timestamp() + make_interval(secs => failed.delay)
    ),
    errors = case when failed.error is null then j.errors else (
        -- Keep the last ten: a job that fails for a month must not grow for a month.
        select jsonb_agg(e order by n) from (
            select
                -- Keep only the newest traceback: each may have 8,000 characters.
                case when failed.trace is null then e else e - 'trace' end as e, n
            from jsonb_array_elements(
                -- A job that is put off again and again must keep its real failures.
                case when not failed.failed and j.errors -> -1 ->> 'error' = failed.error
                    then j.errors - -1 else j.errors
                end
            ) with ordinality as t(e, n)
            union all
            select jsonb_strip_nulls(jsonb_build_object(
                'attempt', failed.attempt, 'at', clock_timestamp(),
                'error', failed.error, 'trace', failed.trace
            )), 1 + coalesce(jsonb_array_length(j.errors), 0)
            order by n desc limit 10
        ) last
    ) end
from failed where j.ctid = failed.at
returning j.id

-- name: discard
with own as materialized ({fence}),
failed as materialized (
    select d.* from unnest(
        %(origins)s::text[], %(ids)s::bigint[], %(failures)s::text[], %(traces)s::text[],
        %(burnt)s::int[]
    ) as d(origin, id, error, trace, burnt)
    where d.origin in (select origin from own)
),
removed as (
    delete from {schema}.jobs j using failed f
    where j.origin = f.origin and j.id = f.id
    returning j.*, f.error, f.trace, f.burnt
),
-- A discarded job is unfinished, so its record is, too; unless its type says otherwise.
held as (
    insert into {schema}.kept_places (source, record_offset, job_id, origin)
    select source, record_offset, id, origin from removed
    where source is not null and type <> all (%(done_types)s::text[])
),
let_go as (
    delete from {schema}.kept_places where job_id in (
        select id from removed where type = any (%(done_types)s::text[])
    )
),
-- A request to stop ends with the job: if an operator retries it, it shall run.
asked as (
    delete from {schema}.cancellations where id in (select id from removed)
),
kept as (
    insert into {schema}.discarded (
        id, origin, type, "group", attempt, priority, payload, headers, unique_key,
        enqueued_at, errors
    )
    select id, origin, type, "group", attempt + crashes + burnt, priority, payload, headers,
        unique_key, enqueued_at,
        (
            select coalesce(
                jsonb_agg(case when trace is null then e else e - 'trace' end), '[]'
            ) from jsonb_array_elements(errors) e
        ) || jsonb_strip_nulls(jsonb_build_object(
            'attempt', attempt + crashes + burnt, 'at', clock_timestamp(),
            'error', error, 'trace', trace
        ))
    from removed
),
ended as (
    select id, origin, type, "group", attempt + crashes + burnt as attempt, enqueued_at,
        'discarded' as outcome
    from removed
),
noted as ({note})
select id from ended

-- name: end_claims
-- Delete claims whose jobs have all ended.
delete from {schema}.claims where owner = %(owner)s and seq = any (%(seqs)s::bigint[])

-- name: trim_claims
-- Take jobs that will not run out of their claims: a crash must not count for them.
update {schema}.claims set ids = array(
    select i.id from unnest(ids) as i(id)
    where not exists (select from unnest(%(ids)s::bigint[]) as g(id) where g.id = i.id)
)
where owner = %(owner)s and seq = any (%(seqs)s::bigint[])

-- name: forget_claims
-- After a lost connection: a claim whose answer never came took nothing.
delete from {schema}.claims where owner = %(owner)s and not seq = any (%(seqs)s::bigint[])
    -- The numbers of the owner's other claimers have other remainders.
    and seq %% %(step)s = %(first)s

-- name: keep_claims
-- After a lost connection: note the running jobs, even if the server lost their claims.
insert into {schema}.claims (owner, seq, ids)
select %(owner)s, f.seq, array_agg(f.id)
from unnest(%(seqs)s::bigint[], %(ids)s::bigint[]) as f(seq, id)
group by f.seq
on conflict (owner, seq) do nothing

-- name: find_overtaken
-- Find jobs in flight whose outcome must not be written, because commits were lost:
-- either their rows are gone, or an earlier row of their group is back, which has ended
-- once and must run again before them. The second column says that another job has the
-- id now.
with flying as materialized (
    select * from unnest(
        %(origins)s::text[], %(groups)s::text[], %(ids)s::bigint[], %(times)s::float8[]
    ) as f(origin, "group", id, enqueued)
),
there as materialized (
    select f.id, date_part('epoch', row.enqueued_at) = f.enqueued as same
    from flying f cross join lateral (
        select j.enqueued_at from {schema}.jobs j
        where j.origin = f.origin and j.id = f.id offset 0
    ) row
)
select f.id, coalesce(not t.same, false)
from flying f left join there t using (id)
where t.same is not true or f."group" is not null and exists (
    select from {schema}.jobs j
    where j.origin = f.origin
        and (j."group", j.id) < (f."group", f.id) and j."group" >= f."group"
        and j.id not in (select id from there where same)
)

-- name: complete_own
-- Both statements go in one text, by the simple protocol. The commit follows the
-- completion at once, so a process that is stopped between the two cannot hold up a
-- take-over, and if the completion is refused, the server rolls back. A pipeline would
-- cost more than all the rest.
select {schema}.complete_job(
    %(owner)s, %(origin)s, %(epoch)s, %(id)s, %(attempt)s, %(keep)s,
    %(before)s, %(before_keep)s, %(role)s
);
commit
