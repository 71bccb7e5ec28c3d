-- The outbox: callers write it in their transactions; the shard's owner sends and
-- deletes.

-- name: write_outbox
-- The key's lock is taken before the id is drawn. So the ids of a key rise in the order
-- in which their transactions commit, which is the order of sending. It runs on any
-- driver: parameters and result are text, the value is bytes, and all are cast.
with locked as materialized (
    select {schema}.lock_in_order(
        hashtextextended('shard/' || cast(%(shard)s as text), 7604),
        hashtextextended(cast(%(topic)s as text) || chr(1) || cast(%(key)s as text), 7603)
    )
),
written as (
    insert into {schema}.outbox (shard, topic, key, value, version, headers)
    select
        cast(%(shard)s as smallint), cast(%(topic)s as text), cast(%(key)s as text),
        cast(%(value)s as bytea), cast(%(version)s as bigint),
        cast(%(headers)s as jsonb)
    from locked
    returning id
)
select cast(id as text), {hinted} from written

-- name: write_current
-- A row whose state is read when it leaves. In a transaction that has given the entity's
-- changes to a re-export, it is a row of that, and needs no lock.
with reexported as materialized (
    select {schema}.write_reexported(
        cast(%(shard)s as smallint), cast(%(topic)s as text), cast(%(key)s as text),
        cast(%(entity)s as text), cast(%(version)s as bigint)
    ) as id
    where current_setting('jobs_lib.reexporting', true) <> ''
),
locked as materialized (
    select {schema}.lock_in_order(
        hashtextextended('shard/' || cast(%(shard)s as text), 7604),
        hashtextextended(cast(%(topic)s as text) || chr(1) || cast(%(key)s as text), 7603)
    )
    where not exists (select from reexported where id is not null)
),
written as (
    insert into {schema}.outbox (shard, topic, key, version, entity)
    select
        cast(%(shard)s as smallint), cast(%(topic)s as text), cast(%(key)s as text),
        cast(%(version)s as bigint), cast(%(entity)s as text)
    from locked
    returning id
)
select cast(id as text), {hinted} from written
union all
select cast(id as text), null from reexported where id is not null

-- name: write_outbox_keyless
with written as (
    insert into {schema}.outbox (shard, topic, value, version, headers)
    values (
        cast(%(shard)s as smallint), cast(%(topic)s as text), cast(%(value)s as bytea),
        cast(%(version)s as bigint), cast(%(headers)s as jsonb)
    )
    returning id
)
select cast(id as text), {hinted} from written

-- name: lock_keys
-- For a bulk call with few keys: lock each key exclusively, then share their shards. A
-- place is [shard, key].
select cast({schema}.lock_all_in_order(
    array_agg(hashtextextended('shard/' || (place ->> 0), 7604)),
    array_agg(hashtextextended(
        cast(%(topic)s as text) || chr(1) || (place ->> 1), 7603
    ))
) as text)
from jsonb_array_elements(cast(%(places)s as jsonb)) as p(place)

-- name: lock_shards
-- For many keys: lock their shards exclusively.
select cast(count(pg_advisory_xact_lock(key)) as text), {coarse} from (
    select distinct hashtextextended('shard/' || shard, 7604) as key
    from jsonb_array_elements_text(cast(%(shards)s as jsonb)) as s(shard) order by key
) shards

-- name: copy_outbox
-- The lines are UTF-8, whatever the encoding of the caller's session is.
copy {schema}.outbox (shard, topic, key, value, version, headers)
from stdin (encoding 'UTF8')

-- name: insert_outbox
-- For drivers without COPY. A row is [shard, key, value, version]; the order is kept.
insert into {schema}.outbox (shard, topic, key, value, version, headers)
select
    cast(value ->> 0 as smallint), cast(%(topic)s as text), value ->> 1,
    decode(value ->> 2, 'hex'), cast(value ->> 3 as bigint),
    cast(%(headers)s as jsonb)
from jsonb_array_elements(cast(%(rows)s as jsonb)) with ordinality as r(value, place)
order by place

-- name: hint_outbox
select cast(pg_notify({schema}.channel('outbox'), '') as text)

-- part: hinted
-- Relays get the hint at commit. Not every row sends one: NOTIFY takes a lock of the
-- whole server.
case when cast(%(hint)s as text) is not null then
    cast(pg_notify({schema}.channel('outbox'), cast(%(hint)s as text)) as text)
end

-- name: known_shards
select cast(shards as text), environment from {schema}.installation

-- name: pending_shards
-- Find the owned shards that have rows, with the id of the first one, and whether some
-- are live and some of re-exports: one index look-up for each class of a shard. The orders keep the
-- planner on this index, and a range in place of a constant class keeps it off the index
-- of keys. If an old snapshot keeps deleted rows, the look-up begins above them.
select s.shard, {server}, coalesce(live.id, batch.id), live.id is not null,
    batch.id is not null, null::float8
from unnest(%(shards)s::int[], %(live_from)s::bigint[], %(batch_from)s::bigint[])
    as s(shard, live_from, batch_from)
left join lateral (
    select o.id from {schema}.outbox o
    where o.shard = s.shard and (o.class, o.id) < (1, 0)
        and (o.class, o.id) >= (0, case when {same_server} then s.live_from else 0 end)
    order by o.class, o.id limit 1
) live on true
left join lateral (
    select o.id from {schema}.outbox o
    where o.shard = s.shard
        and (o.class, o.id) >= (1, case when {same_server} then s.batch_from else 0 end)
    order by o.class, o.id limit 1
) batch on true
where coalesce(live.id, batch.id) is not null
union all
-- The time that the server took for the look-ups.
select null, {server}, null, null, null,
    extract(epoch from clock_timestamp() - statement_timestamp())

-- name: first_rows
-- Find the first row of each class of a shard, from the start, and its first held row. If
-- there are many held rows, the last one read stands for shards without one among them:
-- their own held rows are newer.
with held as materialized (
    select h.shard, h.id from {schema}.held_rows h order by h.id limit 1000
)
select s.shard, live.id, batch.id,
    least(
        (select min(h.id) from held h where h.shard = s.shard),
        (select max(h.id) from held h having count(*) = 1000)
    ),
    {server}, extract(epoch from clock_timestamp() - statement_timestamp())::float8
from unnest(%(shards)s::int[]) as s(shard)
left join lateral (
    select o.id from {schema}.outbox o
    where o.shard = s.shard and (o.class, o.id) < (1, 0) order by o.class, o.id limit 1
) live on true
left join lateral (
    select o.id from {schema}.outbox o
    where o.shard = s.shard and (o.class, o.id) >= (1, 0) order by o.class, o.id limit 1
) batch on true

-- name: open_writers
-- List the transactions that may have drawn ids of rows with keys. Each holds an advisory
-- lock: of its key, and in this release also of its shard. A transaction may have another
-- name after it was prepared.
select
    coalesce(array_agg(distinct
        case when l.pid is null then 'prepared' else l.virtualtransaction end
    ), '{{}}'),
    {server}, extract(epoch from clock_timestamp() - statement_timestamp())::float8
from pg_locks l
where l.locktype = 'advisory' and l.granted
    and l.database = (select d.oid from pg_database d where d.datname = current_database())
    -- Leave out a session's own lock while it is in no transaction.
    and right(l.virtualtransaction, 2) <> '/0'

-- part: own_shard
-- False for a relay that has lost the shard.
exists (
    select from {schema}.origins f
    where f.role = 'relay' and f.origin = %(origin)s
        and f.owner = %(owner)s and f.epoch = %(epoch)s
)

-- part: fenced_shard
-- The same for statements that write: a take-over waits until the statement has ended.
select f.origin from {schema}.origins f
where f.role = 'relay' and f.origin = %(origin)s
    and f.owner = %(owner)s and f.epoch = %(epoch)s and {same_server}
for share of f

-- part: batch_from
-- The id from which rows of re-exports are read.
case when {same_server} then %(batch_from)s::bigint else 0 end

-- part: same_server
-- Behind PgBouncer the server may have changed since the rows were read. A server that
-- lacks commits may have given their ids to other rows, which have not been sent.
%(server)s in (0, {server})

-- part: held
-- Whether a hold keeps the row; null if its topic has no holds. Without holds the array
-- is empty, and each row costs one comparison only. There may be 100,000 holds: their
-- topics are found by leaps along the index, and each row looks up its own hold.
case when o.topic = any (array(
    with recursive t (topic) as (
        (select h.topic from {schema}.holds h order by h.topic limit 1)
        union all
        select (
            select h.topic from {schema}.holds h
            where h.topic > t.topic order by h.topic limit 1
        ) from t where t.topic is not null
    )
    select t.topic from t where t.topic is not null
)) then
    o.topic = any (array(
        select h.topic from {schema}.holds h where h.key is null and h.row_id is null
    )) or exists (
        select from {schema}.holds h
        where h.topic = o.topic and coalesce(h.key, '') = coalesce(o.key, '')
            and coalesce(h.row_id, 0) = case when o.key is null then o.id else 0 end
        -- Otherwise the planner would hash all holds, for each block.
        offset 0
    )
end

-- name: owns_shard
select {own_shard}

-- name: read_live
-- There is no cursor: a row that was committed late, with a lower id, is simply the next
-- one. `live_from` is no cursor either: below it no row with a key can appear. Of large
-- values only the size is read: thousands of them might not fit. JSON writes the time in
-- its final form under all settings of the session; Python would take longer for that.
select o.id, o.ctid, o.topic, o.key,
    case when octet_length(o.value) <= %(inline)s then o.value end,
    o.headers, o.version, o.entity,
    to_json(o.created_at at time zone 'UTC')::text, {held},
    case when octet_length(o.value) > %(inline)s then octet_length(o.value) end
from {schema}.outbox o
where o.shard = %(shard)s and o.class = 0 and {own_shard}
    and o.id >= case when {same_server} then %(live_from)s::bigint else 0 end
    -- For topics that settle: read keys with a row that is old enough, with all their
    -- rows. One time counts for the whole statement: a clock that goes on might let the
    -- newer rows of a key pass and not the older ones.
    and (not %(settles)s or o.topic <> all (%(settling)s::text[]) or o.key is null
        or o.created_at <= statement_timestamp() - (
            select s.seconds * interval '1 second'
            from unnest(%(settling)s::text[], %(settle)s::float8[]) as s(topic, seconds)
            where s.topic = o.topic
        )
        -- A time in the future is from before the server's clock was set back.
        or o.created_at > statement_timestamp() + interval '1 second'
        -- A young row looks for its key here. The list is made once, for the first young
        -- row (a backlog has none in front), and is hashed with any statistics: otherwise
        -- each row of a key that changes all the time would look through all rows.
        or (o.topic || ' ' || o.key) in (select unnest(array(
            select e.topic || ' ' || e.key
            from unnest(%(settling)s::text[], %(settle)s::float8[]) as s(topic, seconds)
            join {schema}.outbox e using (topic)
            where e.shard = %(shard)s and e.key is not null
                -- A range: with a constant class the planner might take the index of
                -- keys.
                and (e.class, e.id) < (1, 0)
                and (e.class, e.id)
                    >= (0, case when {same_server} then %(live_from)s::bigint else 0 end)
                and (
                    e.created_at <= statement_timestamp() - s.seconds * interval '1 second'
                    or e.created_at > statement_timestamp() + interval '1 second'
                )
        ))))
order by o.id limit %(limit)s

-- name: read_values
-- The class is no constant: otherwise a table that seems empty would be read by the index
-- of keys.
select row.id, row.value
from unnest(%(ids)s::bigint[]) as d(id)
cross join unnest(array[0]) as c(class)
cross join lateral (
    select o.id, o.value from {schema}.outbox o
    where o.shard = %(shard)s and o.class = c.class and o.id = d.id offset 0
) row

-- part: newer
-- Whether the row `o` comes too late. Null: no live row of its key waits. False: those
-- that wait carry a state that may be older, so the row must leave behind them. A live
-- row is newer if it was written later, or if its state, too, is read when it leaves. A
-- staged state is not the table's: its version decides once the live row has left. A
-- stale key has records of its own again.
case when o.overtaken then true when exists (
    -- Most keys have none, and one look may answer for all rows.
    select from {schema}.outbox l
    where l.shard = o.shard and l.topic = o.topic and l.key = o.key and l.class = 0
) then (
    select bool_or(
        l.id > o.id or o.stale or (
            l.entity is not distinct from o.entity
            and not (o.source = 'frame' and o.cause = 'reexport')
        )
    )
    from {schema}.outbox l
    where l.shard = o.shard and l.topic = o.topic and l.key = o.key and l.class = 0
) end

-- name: read_batch
-- Rows of re-exports: their state is read when they are sent. A row is dropped if the
-- topic has something newer of its key, or if a live row that waits has it (`newer`).
-- Each re-export that may send now is read from its own first row on, so that however
-- many rows of others lie in front, none is read. The block takes a row of each in turn.
with recursive present (reexport_id) as (
    -- Leap from one re-export to the next along the index: those that ended or were
    -- deleted leave rows, too, which are dropped. If an old snapshot keeps deleted rows,
    -- the leaps would walk over them. Then only the first rows are asked for theirs.
    (
        select coalesce(o.reexport_id, 0) from {schema}.outbox o
        where o.class = 1 and {batch_from} = 0
        order by coalesce(o.reexport_id, 0), o.shard, o.id limit 1
    )
    union all
    select (
        select coalesce(o.reexport_id, 0) from {schema}.outbox o
        where o.class = 1 and coalesce(o.reexport_id, 0) > p.reexport_id
        order by coalesce(o.reexport_id, 0), o.shard, o.id limit 1
    ) from present p where p.reexport_id is not null
)
select o.id, o.ctid, o.topic, o.key, o.entity, o.reexport_id,
    {newer} as newer, o.state, {held} as held, to_json(o.created_at at time zone 'UTC')::text, o.version,
    o.cause, o.source
from (
    select o.*, x.state, x.source, x.stale, {overtaken} as overtaken
    from (
        select few.id, (
            select r.state from {schema}.reexports r where r.id = few.id
        ) as state, (
            select r.source from {schema}.reexports r where r.id = few.id
        ) as source, (
            select r.stale from {schema}.reexports r where r.id = few.id
        ) as stale
        from (
            select p.reexport_id as id from present p where p.reexport_id is not null
            union
            select r.id from {schema}.reexports r
            where r.state in ('loading', 'running') and {batch_from} > 0
            union
            select first.id from (
                select coalesce(o.reexport_id, 0) as id from {schema}.outbox o
                where o.shard = %(shard)s and (o.class, o.id) >= (1, {batch_from})
                    and {batch_from} > 0
                order by o.class, o.id limit %(limit)s
            ) first
        ) few
        where few.id <> all (%(spent)s::bigint[])
        offset 0
    ) x
    cross join lateral (
        select o.ctid, o.* from {schema}.outbox o
        -- A range: with a constant shard the planner might take the primary key.
        where o.class = 1
            and (coalesce(o.reexport_id, 0), o.shard, o.id)
                >= (x.id, %(shard)s, {batch_from})
            and (coalesce(o.reexport_id, 0), o.shard, o.id) < (x.id, %(shard)s + 1, 0)
        order by coalesce(o.reexport_id, 0), o.shard, o.id limit %(limit)s
    ) o
    where x.state is distinct from 'paused'
    order by row_number() over (partition by x.id order by o.id), x.id limit %(limit)s
) o
where {own_shard}
order by o.id

-- name: take_records
select {schema}.take_records(%(reexport)s, %(wanted)s::int)

-- name: owe_records
-- Records that were long on their way count once more: what was granted meanwhile leaves
-- together with them. The bucket may be less than empty for a moment.
update {schema}.reexports set tokens = tokens - %(records)s where id = %(reexport)s

-- name: delete_live
-- Delete exactly the rows that Kafka has acknowledged, under the fence. Rows that
-- appeared meanwhile stay, whatever their ids. It is -1, and nothing is deleted, if
-- something must be noted first.
select case when {must_note} then -1 else {schema}.delete_rows(
    %(shard)s::int, %(owner)s, case when {same_server} then %(epoch)s::bigint else -1 end,
    %(places)s::tid[], %(ids)s::bigint[]
) end

-- name: delete_block
-- The same for a block with rows of re-exports; it also counts their progress.
with own as materialized (
    select mine.origin from ({fenced_shard}) mine where not {must_note}
),
there as (
    -- By the places where they were read, without an index look-up for each. VACUUM
    -- FULL, for one, may have moved the rows, and another may be there now. So the id is
    -- compared, too, in a form that is hashed with any statistics.
    delete from {schema}.outbox o
    where o.ctid = any (%(places)s)
        and (o.id in (select unnest(%(ids)s::bigint[]))) is true
        and exists (select from own)
    returning o.id, o.reexport_id
),
moved as (
    -- All or none: otherwise an older row of a key would be sent after a newer one.
    delete from {schema}.outbox where ctid = any (array(
        select row.ctid
        from unnest(%(ids)s::bigint[]) as d(id)
        cross join unnest(array[0, 1]) as c(class)
        cross join lateral (
            select o.ctid from {schema}.outbox o
            where o.shard = %(shard)s and o.class = c.class and o.id = d.id offset 0
        ) row
        where (select count(*) from there) < cardinality(%(ids)s::bigint[])
            and exists (select from own)
            and d.id not in (select id from there)
    ))
    returning id, reexport_id
),
gone as (select * from there union all select * from moved),
progress as (
    update {schema}.reexports r set
        sent = r.sent + n.sent, superseded = r.superseded + n.superseded,
        marks = {schema}.note_sent(r.marks, r.sent)
    from (
        select reexport_id, count(*) filter (where id <> all (%(dropped)s::bigint[])) as sent,
            count(*) filter (where id = any (%(dropped)s::bigint[])) as superseded
        from gone where reexport_id is not null group by reexport_id
    ) n
    where r.id = n.reexport_id
)
select case when {must_note} then -1 else (select count(*) from gone) end

-- part: due
-- Whether the hold `h` is due. No hold waits for more than 600 seconds: a time further
-- ahead is from before the server's clock was set back.
h.retry_at <= statement_timestamp()
    or h.retry_at > statement_timestamp() + interval '601 seconds'

-- name: hold_rows
-- Hold rows that were refused, with a hold for each, and later rows of their keys. Later
-- rows stay in the outbox if their hold was lifted meanwhile: nothing would lift it
-- again.
with own as materialized ({fenced_shard}),
made as (
    insert into {schema}.holds as h (topic, key, row_id, error, retry_at)
    select distinct on (n.topic, n.key, n.row_id)
        n.topic, n.key, n.row_id, n.error, clock_timestamp() + interval '5 seconds'
    from unnest(
        %(topics)s::text[], %(keys)s::text[], %(row_ids)s::bigint[], %(errors)s::text[]
    ) as n(topic, key, row_id, error)
    where exists (select from own)
    on conflict (topic, coalesce(key, ''), coalesce(row_id, 0)) do update set
        -- Other shards also find a topic missing: only a try that was due is an attempt.
        error = excluded.error,
        attempts = h.attempts + ({due})::int,
        retry_at = case when {due}
            then clock_timestamp()
                + least(600, 5 * power(2, least(h.attempts, 10))) * interval '1 second'
            else h.retry_at
        end
    returning h.*
),
waiting as materialized (
    -- Each row with the holds that may keep it, in the form of their index: that of the
    -- whole topic, and that of its key or of the row itself.
    select o.ctid as place, o.topic, w.key, w.row_id
    from unnest(%(classes)s::int[], %(ids)s::bigint[]) as d(class, id)
    cross join lateral (
        select o.ctid, o.topic, o.key, o.id from {schema}.outbox o
        where o.shard = %(shard)s and o.class = d.class and o.id = d.id offset 0
    ) o
    cross join lateral (
        values ('', 0::bigint),
            (coalesce(o.key, ''), case when o.key is null then o.id else 0 end)
    ) as w(key, row_id)
),
standing as materialized (
    select h.topic, coalesce(h.key, '') as key, coalesce(h.row_id, 0) as row_id
    from (select distinct topic, key, row_id from waiting) w
    join {schema}.holds h on h.topic = w.topic
        and coalesce(h.key, '') = w.key and coalesce(h.row_id, 0) = w.row_id
    where exists (select from own) for share of h
),
moved as (
    delete from {schema}.outbox where ctid = any (array(
        select w.place from waiting w where (w.topic, w.key, w.row_id) in (
            select topic, coalesce(key, ''), coalesce(row_id, 0) from made
            union all
            select topic, key, row_id from standing
        )
    ))
    returning *
)
insert into {schema}.held_rows (
    shard, class, id, topic, key, value, headers, entity, version, cause, reexport_id,
    created_at
)
select shard, class, id, topic, key, value, headers, entity, version, cause, reexport_id,
    created_at
from moved

-- part: rows_of_hold
-- The rows that the hold `h` keeps: each kind of hold uses an index of its own.
(
    select r.id from {schema}.held_rows r
    where h.key is not null and r.topic = h.topic and r.key = h.key
    union all
    select r.id from {schema}.held_rows r
    where h.key is null and r.id = h.row_id and r.topic = h.topic
    union all
    select r.id from {schema}.held_rows r
    where h.key is null and h.row_id is null and r.topic = h.topic
)

-- name: due_holds
-- Find due holds whose first row is in one of the shards. Until that row is sent, none
-- of the others may go. Due holds are at both ends of the index; the others between
-- them, perhaps 100,000, are not read. For that, `due` uses the statement's time: an
-- index cannot be searched with a clock that goes on. The server is returned with them,
-- since there may be no other rows that tell which one it is now.
select h.topic, h.key, h.row_id, r.shard, r.id, {server}
from (
    select h.* from {schema}.holds h where h.retry_at <= statement_timestamp()
    union all
    select h.* from {schema}.holds h
    where h.retry_at > statement_timestamp() + interval '601 seconds'
) h
cross join lateral (
    (select r.shard, r.id, {paused} and not {followed} as waits
    from {schema}.held_rows r
    where h.key is not null and r.topic = h.topic and r.key = h.key
    order by r.id limit 1)
    union all
    select r.shard, r.id, false from {schema}.held_rows r
    where h.key is null and r.id = h.row_id and r.topic = h.topic
    union all
    (select r.shard, r.id, false from {schema}.held_rows r
    where h.key is null and h.row_id is null and r.topic = h.topic
        -- A hold of a whole topic is not tried with a row that has a hold of its own,
        -- too.
        and not exists (
            select from {schema}.holds k
            where k.topic = r.topic and coalesce(k.key, '') = coalesce(r.key, '')
                and coalesce(k.row_id, 0) = case when r.key is null then r.id else 0 end
            offset 0
        )
        and not {paused}
    order by r.id limit 1)
) r
where r.shard = any (%(shards)s::int[]) and not r.waits
order by h.retry_at limit 100

-- part: paused
-- Whether the held row `r` belongs to a re-export that is paused: it waits with it.
exists (
    select from {schema}.reexports x where x.id = r.reexport_id and x.state = 'paused'
)

-- part: followed
-- Whether a live row of its key waits behind the held row `r`: that one has the newer
-- state, and must not wait for a re-export.
exists (
    select from {schema}.held_rows l
    where l.topic = r.topic and l.key = r.key and l.class = 0
)

-- name: read_held
-- The columns of `read_live`, the re-export, whether the row must be dropped by the
-- conditions of `read_batch`, where the re-export's states come from, and whether its
-- rate says when the row leaves.
select r.id, r.ctid, r.topic, r.key, r.value, r.headers, r.version, r.entity,
    to_json(r.created_at at time zone 'UTC')::text, false, null::int, r.reexport_id,
    r.reexport_id is not null
        and (coalesce(e.state, 'cancelled') = 'cancelled' or {followed}),
    r.cause, e.source, coalesce(e.state in ('loading', 'running'), false)
from {schema}.held_rows r left join {schema}.reexports e on e.id = r.reexport_id
where r.shard = %(shard)s and r.id = %(id)s and {own_shard}
    and (e.state is distinct from 'paused' or {followed})

-- name: delete_held
-- Delete the one row that was tried and sent, or dropped. It is -1 as for a block.
with own as materialized (
    select mine.origin from ({fenced_shard}) mine where not {must_note}
),
gone as (
    delete from {schema}.held_rows where id = %(id)s and exists (select from own)
    returning reexport_id
),
progress as (
    update {schema}.reexports r set sent = r.sent + (not %(dropped)s)::int,
        superseded = r.superseded + (%(dropped)s)::int,
        marks = {schema}.note_sent(r.marks, r.sent)
    from gone g where r.id = g.reexport_id
)
select case when {must_note} then -1 else (select count(*) from gone) end

-- name: requeue_hold
-- Let the other due holds go first, and the hold stay due. It is no attempt: nothing was
-- refused.
update {schema}.holds h set retry_at = clock_timestamp()
where h.topic = %(topic)s and coalesce(h.key, '') = coalesce(%(key)s::text, '')
    and coalesce(h.row_id, 0) = coalesce(%(row_id)s::bigint, 0)
    and ({due})

-- name: lift_hold
select {schema}.lift_hold(%(topic)s, %(key)s, %(row_id)s)

-- name: outbox_status
-- Count the waiting rows by topic: at most `limit` rows of each shard are read.
select o.topic, c.kind, count(*), min(o.created_at)
from {schema}.installation i
cross join lateral generate_series(0, i.shards - 1) as s(shard)
cross join (values (0, 'live'), (1, 'batch')) as c(class, kind)
cross join lateral (
    select o.topic, o.created_at from {schema}.outbox o
    where o.shard = s.shard and o.class = c.class order by o.id limit %(limit)s
) o
group by o.topic, c.kind
union all
select r.topic, 'held', count(*), min(r.created_at)
from (select topic, created_at from {schema}.held_rows order by id limit %(limit)s) r
group by r.topic
order by topic, kind

-- name: list_holds
select h.topic, h.key, h.row_id, h.error, h.attempts, h.since, h.retry_at, (
    select count(*) from (select from {rows_of_hold} r limit %(limit)s) rows
)
from {schema}.holds h order by h.since, h.topic, h.key limit %(limit)s

-- name: show_row
-- Look for the id in each shard and class: there is no index of ids alone.
select o.id, o.shard, c.kind, o.topic, o.key, o.value, o.headers, o.version, o.entity,
    o.reexport_id, o.created_at, null
from {schema}.installation i
cross join lateral generate_series(0, i.shards - 1) as s(shard)
cross join (values (0, 'live'), (1, 'batch')) as c(class, kind)
cross join lateral (
    select * from {schema}.outbox o
    where o.shard = s.shard and o.class = c.class and o.id = %(id)s
) o
union all
select r.id, r.shard, 'held', r.topic, r.key, r.value, r.headers, r.version, r.entity,
    r.reexport_id, r.created_at, (
        select min(h.error) from {schema}.holds h
        where h.topic = r.topic and {schema}.is_held_by(h, r.topic, r.key, r.id)
    )
from {schema}.held_rows r where r.id = %(id)s

-- name: retry_holds
-- Let their first rows be tried at once. Only a row that is sent lifts a hold, so that no
-- later row of a key can pass an earlier one.
update {schema}.holds h set retry_at = clock_timestamp()
where (%(topic)s::text is null or h.topic = %(topic)s)
    and (%(key)s::text is null or h.key = %(key)s)
returning h.topic

-- name: drop_row
-- Delete only held rows; the rows behind it are tried at once. A re-export counts the row
-- as done, or it would never end. Of a change, the topic's copies are told: this returns
-- its version, as that of a tombstone.
with gone as (
    delete from {schema}.held_rows where id = %(id)s
    returning topic, key, version, value, cause, reexport_id
),
progress as (
    update {schema}.reexports r set superseded = r.superseded + 1
    from gone g where r.id = g.reexport_id
),
next as (
    update {schema}.holds h set retry_at = clock_timestamp()
    from gone g where h.topic = g.topic and h.key = g.key
)
select topic, key, version + (value is not null)::int,
    key is not null and cause is distinct from 'reexport', reexport_id
from gone

-- name: end_idle_holds
-- Lift holds that keep no rows back any more. A relay may set rows aside behind one of
-- them meanwhile. This releases them, as it sees what was committed after its start.
select {schema}.lift_hold(h.topic, h.key, h.row_id)
from {schema}.holds h where not exists (select from {rows_of_hold} r)
