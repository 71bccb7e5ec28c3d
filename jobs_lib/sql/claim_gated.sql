-- What claims also read if the types of a section wait for other groups: the type has
-- `after`. Each part is empty in a plain query, and `x_gated` stands for `x` in
-- `claim_gated` and the like.

-- part: read_gate

-- part: read_gate_gated
-- The place of the record that a job comes from. It costs other claims nothing.
, j.source, j.record_offset {read_opened}

-- part: read_opened

-- part: read_opened_gated
, {opened} as opened

-- part: if_opened

-- part: if_opened_gated
and {opened}

-- part: able_if_opened

-- part: able_if_opened_gated
and q.opened

-- part: plain_if_opened

-- part: plain_if_opened_gated
and r.opened

-- part: late_if_opened

-- part: late_if_opened_gated
and s.opened

-- part: newer_if_opened

-- part: newer_if_opened_gated
-- A job that must still wait replaces none that may run: else, with new ones all the
-- time, none would ever run.
and {opened}

-- part: gate

-- part: gate_gated
, opened

-- part: suspect_if_opened

-- part: suspect_if_opened_gated
and l.opened

-- part: record

-- part: record_gated
, source, record_offset

-- part: row_place
-- The row's place: its completion finds it there without the index.
t.tid::text as place

-- part: row_place_gated
-- The same, with the record before the place: see `found.py`.
coalesce(t.source || ':' || t.record_offset, '') || t.tid::text as place

-- part: passed_at_gate

-- part: passed_at_gate_gated
union all
-- Rows passed over only because their gate is closed: how many of each partition, and the
-- highest of their offsets. `find_opened` finds them again.
select 11, l.origin, max(l.record_offset), null, null, count(*)::int, l.source, null, null,
    null, null, null, null, null, null, null
    {no_value}
from (
    select origin, type, state, opened, source, record_offset from looked
    union all
    select origin, type, state, opened, source, record_offset from lanes
) l
where not l.opened and l.state = 'available' and l.type = any (%(types)s::text[])
group by l.origin, l.source

-- part: gather_closed

-- part: gather_closed_gated
, array_agg(r.source) filter (where r.closed) as closed_sources
, array_agg(r.record_offset) filter (where r.closed) as closed_offsets

-- part: read_closed

-- part: read_closed_gated
, j.source, j.record_offset
, j.state = 'available' and j.type <> all (%(skipped_types)s::text[]) and not {opened}
    as closed

-- part: closed_at_gate

-- part: closed_at_gate_gated
, closed as materialized (
    select u.source, max(u.record_offset) as furthest
    from first f
    cross join lateral unnest(f.closed_sources, f.closed_offsets)
        as u(source, record_offset)
    group by u.source
)

-- part: closed_of_gate
'{{}}'::int[] as closed_sources, '{{}}'::bigint[] as closed_offsets

-- part: closed_of_gate_gated
-- Partitions whose gate is closed for some of these rows, and the highest offsets.
array(select c.source from closed c order by c.source) as closed_sources,
array(select c.furthest from closed c order by c.source) as closed_offsets

-- part: opened

true

-- part: opened_gated
-- Whether the gate of the job's record is open. `gate_ends` says for each partition, by
-- its number, up to which offset its gate is open. A partition that it lacks is not known
-- yet. A job without a record is judged by the worker, who says what is wrong.
coalesce(
    j.record_offset < (%(gate_ends)s::bigint[])[j.source - %(gate_first)s::int],
    j.source is null
)

-- name: read_job_sources
-- The partitions whose jobs have places.
select id, consumer_group, topic, partition from {schema}.sources

-- part: slice
-- The first jobs of each partition behind an offset and id. Nothing below the mark of
-- `find_done` is unfinished, so it never begins below that.
slice as materialized (
    select o.source, r.* from (
        select g.source, g."end", greatest(g.low, coalesce(f.done_offset, 0)) as low,
            case when f.done_offset > g.low then 0 else g.low_id end as low_id
        from unnest(
            %(sources)s::int[], %(lows)s::bigint[], %(low_ids)s::bigint[], %(ends)s::bigint[]
        ) as g(source, low, low_id, "end")
        join {schema}.sources s on s.id = g.source
        left join {schema}.offsets f using (consumer_group, topic, partition)
    ) o
    cross join lateral (
        select j.record_offset, j.id, j.origin, j.type, j.state, j.priority
        from {schema}.jobs j
        where j.source = o.source and (j.record_offset, j.id) > (o.low, o.low_id)
            and j.record_offset < o."end"
        order by j.record_offset, j.id limit %(limit)s
    ) r
)

-- name: find_opened
-- The jobs behind the cursors whose gate has opened, in the order of their records. A
-- claim passes over rows whose gate is closed and notes none of them, since there may be
-- millions. When a gate moves on, these are the rows between its old and its new offset.
-- Reads only, and at most `limit` rows of each partition.
with {slice}
select s.source, s.record_offset, s.id, s.origin
from slice s
join unnest(
    %(origins)s::text[], %(cursors)s::bigint[], %(highs)s::bigint[], %(batches)s::bigint[]
) as o(origin, cursor, high, batch) using (origin)
-- Windows have not reached the others, and will find them by themselves.
where s.id <= case s.priority when 0 then o.cursor when 1 then o.high else o.batch end
    and s.state = 'available' and s.type = any (%(types)s::text[])
union all
-- How far it went in a partition that may have more.
select source, max(record_offset),
    (array_agg(id order by record_offset desc, id desc))[1], null
from slice group by source having count(*) >= %(limit)s

-- name: find_waiting
-- Of which partitions jobs still wait behind a closed gate: claims do not meet a job again
-- that they have passed over, and nobody tells them that it was cancelled. Reads only, and
-- at most `limit` rows of each partition; where it has read so many, it says how far it
-- went. Partitions are left out that have none.
with {slice}
select source,
    bool_or(
        origin = any (%(origins)s::text[]) and state = 'available'
        and type = any (%(types)s::text[])
    ),
    case when count(*) >= %(limit)s then max(record_offset) end,
    (array_agg(id order by record_offset desc, id desc))[1]
from slice group by source
