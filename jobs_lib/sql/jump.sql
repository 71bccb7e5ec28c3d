-- Look past rows that cannot run.
--
--     jobs (up to `limit` rows) ---> first ---> candidates ---> the ids that may be claimed
--                                      |
--                                      +----> how far it has looked, and at how many rows
--
--   first        of each group, and of each row without one: its head, its first row that
--                is free, and how far its rows go
--   candidates   the free rows that are their group's head as far as these rows show

-- name: jump
-- If no row of the windows could run: the next rows further on that a claim might take,
-- and how far this query has looked. Most rows are behind another one of their group; these
-- rows themselves, or one probe for each group, show that. It reads at most `limit` rows,
-- so that no round takes long.
with first as materialized (
    select r."group", min(r.id) as head, min(r.id) filter (where r.free) as id,
        min(r.id) filter (where r.free and r.last) as last_id,
        array_agg(r.type) filter (where r.free and r.last) as lasts,
        max(r.id) as furthest, count(*) as count
        {gather_full}
        {gather_closed}
    from (
        select j.id, j."group", j.type, j.type = any (%(last_types)s::text[]) as last,
            j.state = 'available' and j.priority = 0
                and j.type <> all (%(skipped_types)s::text[]) and {unfull} {if_opened} as free
            {read_full}
            {read_closed}
        from {schema}.jobs j
        where j.origin = %(origin)s and j.id > %(cursor)s order by j.id limit %(limit)s
    ) r
    -- A row without a group depends on no other.
    group by r."group", case when r."group" is null then r.id end
),
candidates as materialized (
    select %(origin)s::text as origin, f."group", c.id, c.lasts,
        least(coalesce(floor.id, 0), c.id - 1) as floor
    from first f
    cross join lateral (
        select f.id, null::text[] as lasts where f.id = f.head
        union all
        -- The group's head may give way to it.
        select f.last_id, f.lasts where f."group" is not null and f.last_id is not null
    ) c
    left join unnest(%(floor_groups)s::text[], %(floor_ids)s::bigint[])
        as floor("group", id) using ("group")
    left join unnest(%(groups)s::text[]) as busy("group") using ("group")
    where busy."group" is null
    order by c.id
)
{closed_at_gate}
select
    array(
        -- In the order in which they were stored, as many as there is room for.
        select f.id from candidates f
        where case
            when f."group" is null then true
            when exists (
                select from {schema}.pauses p
                where p.kind = 'group' and p.name = f."group" offset 0
            ) then false
            when f.lasts is not null then {yields}
            else f.id = (
                select j.id from {schema}.jobs j
                where j.origin = %(origin)s
                    and (j."group", j.id) > (f."group", f.floor)
                    and j."group" <= f."group"
                order by j."group", j.id limit 1
            )
        end
        limit %(room)s
    ) as ids,
    (select max(furthest) from first) as furthest,
    (select coalesce(sum(count), 0)::bigint from first) as seen,
    {full_of_value},
    {closed_of_gate}
