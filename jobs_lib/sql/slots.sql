-- Slots of limited types: each lets one job run. See
-- `jobs_lib/executor/limiting/slots.py`.

-- name: take_slots
-- Take free numbers below this process's limit; the limit may be another one in
-- processes that took the others. A process that gets none marks a slot of the process
-- with the most slots, if that is fair: if that one has two more than this one, or this
-- one has none.
with asked as (
    select a.value, a.count from unnest(%(values)s::text[], %(counts)s::bigint[])
        as a(value, count)
),
taken as (
    insert into {schema}.slots (type, value, slot, owner)
    select %(type)s, a.value, free.slot, %(owner)s
    -- In a fixed order, so that two processes that take the same slots cannot deadlock.
    from (select * from asked order by value) a
    cross join lateral (
        select n as slot from generate_series(1, %(most)s::int) n
        where not exists (
            select from {schema}.slots s
            where s.type = %(type)s and s.value = a.value and s.slot = n
        )
        order by n limit a.count
    ) free
    on conflict do nothing
    returning value
),
granted as (select value, count(*) as count from taken group by value),
found as (
    -- Skip a slot that is just being released: waiting for it might deadlock.
    select s.value, s.slot from (
        select a.value, most.slot from asked a
        cross join lateral (
            select count(*) as count from {schema}.slots m
            where m.type = %(type)s and m.value = a.value and m.owner = %(owner)s
        ) mine
        cross join lateral (
            select (array_agg(h.slot order by h.slot))[1] as slot
            from {schema}.slots h
            where h.type = %(type)s and h.value = a.value and h.owner <> %(owner)s
            group by h.owner
            having not bool_or(h.wanted) and (mine.count = 0 or count(*) > mine.count + 1)
            order by count(*) desc limit 1
        ) most
        where a.value not in (select value from granted)
    ) m
    join {schema}.slots s on s.type = %(type)s and s.value = m.value and s.slot = m.slot
    for update of s skip locked
),
marked as (
    update {schema}.slots s set wanted = true from found
    where s.type = %(type)s and s.value = found.value and s.slot = found.slot
)
select value, count from granted

-- name: give_slots_back
-- Release a number of slots of each value; those that others want go first.
delete from {schema}.slots s
using (
    select s.value, s.slot, row_number() over (
        partition by s.value order by s.wanted desc, s.slot desc
    ) as place, given.count
    from unnest(%(values)s::text[], %(counts)s::bigint[]) as given(value, count)
    join {schema}.slots s on s.type = %(type)s and s.value = given.value
    where s.owner = %(owner)s
) mine
where mine.place <= mine.count
    and s.type = %(type)s and s.value = mine.value and s.slot = mine.slot

-- name: count_slots
-- Count what the process holds if it does not know: after an answer was lost, or after
-- others may have taken it for dead.
select s.value, count(*) from {schema}.slots s
where s.owner = %(owner)s and s.type = %(type)s
group by s.value

-- name: watch_slots
-- Count the slots that the process holds, to compare with what it knows; and those of
-- them that others want.
select null as value, count(*) from {schema}.slots s
where s.owner = %(owner)s and s.type = %(type)s
union all
select s.value, count(*) from {schema}.slots s
where s.owner = %(owner)s and s.type = %(type)s and s.wanted
group by s.value

-- name: free_slots_of_the_dead
-- If such a process lives after all, the lock delays its heartbeat until this commits: it
-- then notices the loss when it next watches its slots.
with owners as materialized (
    select distinct s.owner as id from {schema}.slots s where s.type = %(type)s
),
gone as materialized (
    select p.id from {schema}.processes p
    where p.id in (select id from owners) and {dead}
    for share of p skip locked
)
delete from {schema}.slots s
where s.type = %(type)s and (
    s.owner in (select id from gone)
    or not exists (select from {schema}.processes p where p.id = s.owner)
)
