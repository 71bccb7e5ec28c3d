-- Claim the newest rows of one origin if they are plain: the short form of `claim`.
--
--     own ------> looked (one window) ---> claimed (a row of `claims`)
--      |             |
--      v             v
--     5 ======= 0: jobs, 1: how far the window went
--
--   own       the origin if it is still ours, locked against changes of its jobs
--   looked    the rows of its window, and whether all up to each of them are plain
--   claimed   writes what is taken into one row of `claims`

-- name: claim_plain
-- The same for one origin with new rows, as long as these are plain:
-- no group, no other priority, no suspect, no unknown type. A plan of a tenth of the
-- size starts in a third of the time, and between an enqueue and its run time counts.
with own as materialized (
    select o.origin from {schema}.origins o
    where o.role = %(role)s and o.origin = %(origin)s
        and o.owner = %(owner)s and o.epoch = %(epoch)s
        and {uncancelled}
    for share of o skip locked
),
looked as materialized (
    select r.*, bool_and(
        r."group" is null and r.priority = 0 and r.crashes < 2
        and r.type = any (%(types)s::text[]) {plain_if_unfull} {plain_if_opened}
    ) over (order by r.id) as plain
    from (
        select j.*, j.ctid as tid, {may_be_placed} as placed {read_value} {read_opened}
        from {schema}.jobs j
        where j.origin = %(origin)s and j.id > %(cursor)s
        order by j.id limit %(size)s
    ) r
    where exists (select from own)
),
claimed as (
    insert into {schema}.claims (owner, seq, ids)
    select %(owner)s, %(seq)s, array_agg(id) from looked
    where plain and state = 'available'
    having count(*) > 0 and set_config('synchronous_commit', 'off', true) is not null
)
select 0 as kind, t.origin, t.id, t.type, t."group", t.attempt, t.crashes, t.priority,
    case
        when pg_column_compression(t.payload) is null and pg_column_size(t.payload) <= 8192
            or octet_length(t.payload::text) <= 8192
        then t.payload::text
    end as payload,
    t.run_at, date_part('epoch', t.enqueued_at) as enqueued, t.headers, false as cut,
    t.placed as delayed_or_placed, null::float8 as age,
    {row_place}
    {value}
from looked t where t.plain and t.state = 'available'
union all
select case when exists (select from own) then 1 else 5 end, %(origin)s,
    max(l.id) filter (where l.plain), null, null, count(*)::int, null, 0, null, null, null,
    null, bool_and(l.plain), null, null, null
    {no_value}
from looked l having count(*) > 0 or not exists (select from own)
