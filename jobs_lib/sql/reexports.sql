-- Re-exports: plan, load, export, control.
--
-- Locks are always taken in this order: the range's row, then the re-export's row. A
-- relay that takes records locks only the re-export's row.
--
-- A query named `source_…` reads the service's own table: jobs_lib.reexport.source fills
-- in the table, the columns of the key, and what is made of them. No such query has
-- parameters: the driver would look for them in the names, too.

-- name: find_source
-- Read the types of the key's columns, whether one can be null, and whether an index
-- keeps the key unique. A view has no constraints, so its keys count as nullable and
-- repeated. A column that is missing is missing here, too.
with named as (
    select a.attrelid, array_agg(a.attname::text order by k.n) as names,
        array_agg(format_type(a.atttypid, a.atttypmod) order by k.n) as types,
        bool_and(a.attnotnull) as not_null, array_agg(a.attnum) as numbers
    from unnest(%(keys)s::text[]) with ordinality as k(name, n)
    join pg_attribute a on a.attrelid = to_regclass(%(table)s) and a.attname = k.name
        and a.attnum > 0 and not a.attisdropped
    group by a.attrelid
)
select
    named.names, named.types, named.not_null,
    -- An index of fewer columns keeps them unique, too; one of a table does not see the
    -- rows of tables that inherit from it.
    (c.relkind = 'p' or not c.relhassubclass) and exists (
        select from pg_index i
        where i.indrelid = c.oid and i.indisunique and i.indisvalid
            and i.indpred is null and not exists (
                select from unnest(i.indkey::int2[]) with ordinality as u(number, n)
                where u.n <= i.indnkeyatts and u.number <> all (named.numbers)
            )
    ),
    -- An estimate; negative or 0 before the first analyze, and for views.
    c.relkind in ('r', 'm') and c.relpages > 0, greatest(c.reltuples, 0)::bigint
from named join pg_class c on c.oid = named.attrelid

-- name: source_has_null_key
select exists (select from {{table}} where not ({{present}}))

-- name: source_count
select count(*) from {{table}}

-- name: source_count_distinct
select count(*) from (select distinct {{columns}} from {{table}}) keys

-- name: source_cuts
-- Find each key that begins a range, by the key's own order and rank: so neither its type
-- nor gaps and skew in its values matter. An index on the key saves the sort.
select {{text}} from (
    select {{columns}}, row_number() over (order by {{columns}}) - 1 as jobs_lib_rank
    from {{table}}
) ranked where jobs_lib_rank > 0 and mod(jobs_lib_rank, {{size}}) = 0 order by jobs_lib_rank

-- name: source_cuts_distinct
select {{text}} from (
    select {{columns}}, row_number() over (order by {{columns}}) - 1 as jobs_lib_rank
    from (select distinct {{columns}} from {{table}}) keys
) ranked where jobs_lib_rank > 0 and mod(jobs_lib_rank, {{size}}) = 0 order by jobs_lib_rank

-- name: source_cuts_sampled
-- Ranges from a sample also cover all keys; only their sizes are less equal.
select {{text}} from (
    select {{columns}}, row_number() over (order by {{columns}}) - 1 as jobs_lib_rank
    from (
        select distinct {{columns}} from {{table}} tablesample system ({{percent}})
    ) keys
) ranked where jobs_lib_rank > 0 and mod(jobs_lib_rank, {{size}}) = 0 order by jobs_lib_rank

-- name: source_keys
-- Keys that a collation takes for equal are different keys of records.
select distinct ({{text}}) collate "C" from {{table}} where {{present}} and {{within}}

-- name: source_keys_unique
-- Without `distinct`, which would sort them again.
select {{text}} from {{table}} where {{present}} and {{within}}

-- name: source_packed_keys
-- The bytes of all keys and the length of each, for those who read them in columns. The
-- driver would take a step in Python for each row.
select string_agg(key, ''::bytea), string_agg(int4send(octet_length(key)), ''::bytea)
from (select convert_to(key, 'UTF8') as key from ({{keys}}) as found(key)) keys

-- name: settle_text_forms
-- A key's text must be the same in every connection, whatever its defaults are.
select set_config('TimeZone', 'UTC', true), set_config('DateStyle', 'ISO, YMD', true),
    set_config('IntervalStyle', 'postgres', true), set_config('bytea_output', 'hex', true),
    set_config('extra_float_digits', '1', true)

-- name: read_home
-- Run this in the transaction that begins a re-export. Then a change of the number comes
-- before it, or waits until the re-export is there, and is refused.
select topic, partitions from {schema}.hold_home_topic() where topic is not null

-- name: start_reexport
-- If two start at once, the unique index lets one in, and the other gets no row.
insert into {schema}.reexports (entity, topic, rate)
values (%(entity)s, %(topic)s, %(rate)s)
on conflict (entity) where state in ('loading', 'running', 'paused') do nothing
returning id, started_at

-- name: plan_ranges
-- `keys` is the planned number until the range is loaded, then the true one.
insert into {schema}.reexport_ranges (reexport_id, range, lower, upper, keys)
select %(reexport)s, (r.n - 1)::int, r.lower, r.upper, r.keys
from unnest(%(lowers)s::text[], %(uppers)s::text[], %(keys)s::bigint[])
    with ordinality as r(lower, upper, keys, n)

-- name: begin_snapshot
begin isolation level repeatable read read only

-- name: export_snapshot
-- The holder waits in its transaction, which servers may limit to less. It gives the
-- snapshot up itself; a process that is stopped, or cut off, cannot.
with limited as materialized (
    select set_config(name, %(limit)s, true) from pg_settings
    where name in ('idle_in_transaction_session_timeout', 'transaction_timeout')
)
select pg_export_snapshot() from (select count(*) from limited) l

-- name: count_loaded_ranges
select count(loaded_at), count(*) from {schema}.reexport_ranges
where reexport_id = %(reexport)s

-- name: note_snapshot
update {schema}.reexports set snapshot = %(snapshot)s where id = %(reexport)s

-- name: lose_snapshot
-- The ranges that are still to be loaded are of a later moment.
update {schema}.reexports x set snapshot = 'lost'
where x.id = %(reexport)s and x.snapshot <> 'lost' and exists (
    select from {schema}.reexport_ranges r
    where r.reexport_id = x.id and r.loaded_at is null
)

-- name: find_unfinished
select x.id, x.started_at, x.stale, x.topic, exists (
    select from {schema}.reexport_ranges r where r.reexport_id = x.id
)
from {schema}.reexports x
where x.entity = %(entity)s and x.state in ('loading', 'running', 'paused')

-- name: give_changes
select cast({schema}.reexport_changes(
    cast(%(entity)s as text), cast(%(topic)s as text), cast(%(rate)s as int)
) as text)

-- name: find_latest
select id, state from {schema}.reexports where entity = %(entity)s
order by id desc limit 1

-- part: has_filled
-- Whether the re-export `x` has sent each key of its entity's table. One of stale keys, of
-- a DataFrame, or of the changes of transactions alone says nothing about other keys.
(
    x.state = 'finished' and not x.stale and x.source = 'table' and exists (
        select from {schema}.reexport_ranges r where r.reexport_id = x.id
    )
)

-- name: find_filled
-- The latest re-export that has filled a topic, and began after another one.
select x.id from {schema}.reexports x
where x.entity = %(entity)s and x.topic = %(topic)s and x.id > %(after)s and {has_filled}
order by x.id desc limit 1

-- name: pending_ranges
select range, keys from {schema}.reexport_ranges
where reexport_id = %(reexport)s and loaded_at is null order by range

-- name: limit_loader
-- A loader that stands still, or whose machine is gone, must not keep what it has locked:
-- whoever loads its range again waits for it. The server alone notices that, and by its own
-- keepalives after hours. Only the transaction has these limits.
select set_config('idle_in_transaction_session_timeout', '60s', true),
    set_config('tcp_keepalives_idle', '15', true),
    set_config('tcp_keepalives_interval', '5', true),
    set_config('tcp_keepalives_count', '3', true),
    set_config('tcp_user_timeout', '30s', true)

-- name: lock_range
-- A second task for the range may be a retried, a speculative or an orphaned one. It
-- waits here and then sees that the range is loaded. The time of start distinguishes
-- the re-export from one with the same id after a server has lost its last commits.
select r.lower, r.upper, r.loaded_at is not null, x.state, x.rate,
    x.total - x.sent - x.superseded, clock_timestamp()
from {schema}.reexport_ranges r join {schema}.reexports x on x.id = r.reexport_id
where r.reexport_id = %(reexport)s and r.range = %(range)s
    and x.started_at = %(started_at)s
for update of r

-- name: mark_range_loaded
update {schema}.reexport_ranges set keys = %(keys)s, loaded_at = clock_timestamp()
where reexport_id = %(reexport)s and range = %(range)s

-- name: lock_reexport
-- A statement of its own: the next one must see what others have committed meanwhile.
-- Returns the snapshot that all ranges are loaded from, if there is one.
--
-- Relays wait for the row, and send no live rows meanwhile. So the server ends a process
-- soon that is stopped between this and its commit.
select nullif(snapshot, 'lost'),
    set_config('idle_in_transaction_session_timeout', '10s', true)
from {schema}.reexports where id = %(reexport)s for update

-- name: count_range
update {schema}.reexports x set
    total = x.total + %(keys)s,
    state = case
        when x.state = 'loading' and not exists (
            select from {schema}.reexport_ranges r
            where r.reexport_id = x.id and r.loaded_at is null
        ) then 'running' else x.state
    end
where x.id = %(reexport)s

-- name: read_reexport
-- No lock: the relay drops rows that are written during a cancel, like those written
-- before it. A share lock would hold up every grant of records.
select
    -- No entity has this name. So a relay of an earlier release, which knows no staged
    -- states, keeps the rows back: it would send the table's.
    case x.source when 'frame' then x.entity || ' of a DataFrame' else x.entity end,
    x.topic, x.state, x.rate, x.total - x.sent - x.superseded, i.shards,
    {schema}.measure_sent(x.marks, x.sent)
from {schema}.reexports x cross join {schema}.installation i
where x.id = %(reexport)s

-- name: count_batch_rows
-- Count the re-export's rows in the outbox, up to `limit`. The order keeps the planner on
-- their index, so that no row of another re-export is read.
select count(*) from (
    select from {schema}.outbox o
    where o.class = 1 and (coalesce(o.reexport_id, 0), o.shard) >= (%(reexport)s, 0)
        and (coalesce(o.reexport_id, 0), o.shard) < (%(reexport)s + 1, 0)
    order by coalesce(o.reexport_id, 0), o.shard, o.id limit %(limit)s
) waiting

-- name: export_keys
-- Rows without a value: the relay reads the state when it sends them.
-- A version is that of the tombstone, if the key is gone by then.
insert into {schema}.outbox (
    shard, class, topic, key, entity, version, cause, reexport_id
)
select k.shard, 1, %(topic)s, k.key, %(entity)s, k.version, 'reexport', %(reexport)s
from unnest(%(shards)s::smallint[], %(keys)s::text[], %(versions)s::bigint[])
    as k(shard, key, version)

-- name: change_rate
update {schema}.reexports set rate = %(rate)s
where id = %(reexport)s and state in ('loading', 'running', 'paused')
returning state

-- name: wake_chunks
-- Chunk jobs that sleep for longer wake up earlier, each at another time, so that not all
-- wake up at once. No claim has a scheduled row. One that is just being promoted, moved or
-- cancelled is left out, so this neither waits nor deadlocks. Origin by origin, along the
-- index of due times: none that is woken is found again.
with chosen as materialized (
    select row.* from {schema}.job_origins() as o(origin)
    cross join lateral (
        select j.ctid as at from {schema}.jobs j
        where j.origin = o.origin and j.state = 'scheduled'
            and j.run_at > clock_timestamp() + make_interval(secs => %(seconds)s)
            -- As text: other types of jobs may have such a field of another kind, and it
            -- may be read before the type is compared.
            and j.type = any (%(types)s)
            and j.payload ->> 'reexport' = %(reexport)s::bigint::text
            and (j.attempt = 0 or %(failed)s)
        order by j.run_at limit %(limit)s
        for no key update skip locked
    ) row
    limit %(limit)s
)
update {schema}.jobs j
set run_at = clock_timestamp() + random() * make_interval(secs => %(seconds)s)
from chosen where j.ctid = chosen.at

-- part: going_on
-- The state of a re-export that is paused no more.
(
    select case when exists (
        select from {schema}.reexport_ranges r
        where r.reexport_id = x.id and r.loaded_at is null
    ) then 'loading' else 'running' end
)

-- name: pause_reexport
update {schema}.reexports set state = 'paused', lagging = false
where id = %(reexport)s and state in ('loading', 'running', 'paused')
returning state

-- name: resume_reexport
update {schema}.reexports x set
    state = case when x.state = 'paused' then {going_on} else x.state end,
    lagging = false
where x.id = %(reexport)s and x.state in ('loading', 'running', 'paused')
returning x.state

-- name: change_lag_limit
-- Without a limit nobody would let it go on that is paused because of one.
update {schema}.reexports x set
    lag_group = %(group)s, lag_limit = %(records)s,
    lag = case when x.lag_group = %(group)s then x.lag end,
    lagging = x.lagging and %(group)s::text is not null,
    state = case
        when x.state = 'paused' and x.lagging and %(group)s::text is null then {going_on}
        else x.state
    end
where x.id = %(reexport)s and x.state in ('loading', 'running', 'paused')
returning x.state

-- name: find_watched
-- The re-exports that a lag can pause, or has paused.
select x.id, x.topic, x.lag_group from {schema}.reexports x
where x.lag_group is not null
    and (x.state in ('loading', 'running') or (x.state = 'paused' and x.lagging))

-- name: steer_by_lag
-- Every relay asks, and one of them changes the state. A person may have changed the
-- state, the group or its limit meanwhile. The old row is locked first: `returning` has
-- only the new one.
with before as materialized (
    select x.id, x.state from {schema}.reexports x
    where x.id = %(reexport)s and x.lag_group = %(group)s
        and (x.state in ('loading', 'running') or (x.state = 'paused' and x.lagging))
        and (
            x.lag is distinct from %(lag)s
            or (x.state <> 'paused' and %(lag)s > x.lag_limit)
            or (x.state = 'paused' and %(lag)s <= x.lag_limit / 2)
        )
    for update
)
update {schema}.reexports x set
    lag = %(lag)s,
    state = case
        when before.state <> 'paused' and %(lag)s > x.lag_limit then 'paused'
        when before.state = 'paused' and %(lag)s <= x.lag_limit / 2 then {going_on}
        else before.state
    end,
    lagging = case
        when before.state <> 'paused' then %(lag)s > x.lag_limit
        else %(lag)s > x.lag_limit / 2
    end
from before where x.id = before.id
returning x.entity, before.state, x.state, x.lag_limit

-- name: cancel_reexport
update {schema}.reexports set state = 'cancelled', finished_at = clock_timestamp()
where id = %(reexport)s and state in ('loading', 'running', 'paused')
returning state

-- name: finish_reexport
-- This is cheap: it reads one row by its key, and the ranges only at the very end. Returns
-- whether it did it, and whether rows must be counted before.
with finished as (
    update {schema}.reexports x set state = 'finished', finished_at = clock_timestamp()
    where x.id = %(reexport)s and x.state in ('loading', 'running')
        and x.sent + x.superseded >= x.total
        and not exists (
            select from {schema}.reexport_ranges r
            where r.reexport_id = x.id and r.loaded_at is null
        )
        -- Not while the topic is compared: stale keys are loaded in one range, at its end.
        and (not x.stale or exists (
            select from {schema}.reexport_ranges r where r.reexport_id = x.id
        ))
        -- Not while a transaction may give rows to it, or has, and they are not counted.
        -- In this order: the lock is only asked for at the very end.
        and case when exists (
            select from {schema}.reexport_additions a where a.reexport_id = x.id
        ) then false else pg_try_advisory_xact_lock({schema}.reexport_lock(x.id)) end
    returning x.id
)
select exists (select from finished), exists (
    select from {schema}.reexports x
    join {schema}.reexport_additions a on a.reexport_id = x.id
    where x.id = %(reexport)s and x.state in ('loading', 'running')
        and x.sent + x.superseded >= x.total
)

-- name: list_open
-- Those that may be done. The last records of one end it, unless it has none: the last
-- transaction that gave it rows was rolled back, or its last jobs found it ended.
select x.id from {schema}.reexports x where x.state in ('loading', 'running')

-- name: list_cancelled
-- Those that were cancelled a moment ago: some of their jobs may still sleep.
select x.id from {schema}.reexports x
where x.state = 'cancelled' and x.finished_at > clock_timestamp() - interval '10 minutes'

-- part: progress
select
    x.id, x.entity, x.state, x.rate,
    -- Ranges that are not loaded yet count as planned.
    n.total, x.sent, x.superseded, coalesce(r.ranges, 0)::int,
    coalesce(r.loaded, 0)::int, x.started_at,
    case when x.state in ('loading', 'running') then clock_timestamp() + make_interval(
        -- The bucket is refilled a little more slowly than the rate: see take_records.
        -- If nothing was sent in the last minute, nobody knows.
        secs => greatest(0, n.total - x.sent - x.superseded)::float8
            * 60 / nullif(least(x.rate * 0.975, m.measured), 0)
    ) end,
    x.finished_at, x.total + n.uncounted, x.lag_group, x.lag_limit, x.lag, x.lagging,
    m.measured::int, x.snapshot <> 'lost', x.stale
from {schema}.reexports x
left join lateral (
    select sum(r.keys) as keys, count(*) as ranges, count(r.loaded_at) as loaded
    from {schema}.reexport_ranges r where r.reexport_id = x.id
) r on true
cross join lateral (
    select coalesce(sum(a.rows), 0)::bigint as uncounted,
        (coalesce(r.keys, 0) + x.added + coalesce(sum(a.rows), 0))::bigint as total
    from {schema}.reexport_additions a where a.reexport_id = x.id
) n
cross join lateral (
    select {schema}.measure_sent(x.marks, x.sent) as measured
    where x.state not in ('cancelled', 'finished')
    union all
    select null where x.state in ('cancelled', 'finished')
) m

-- name: reexport_progress
{progress}
where x.id = %(reexport)s

-- name: list_reexports
{progress}
order by x.id desc limit %(limit)s
