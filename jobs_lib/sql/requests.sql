-- The requests by which events were published to streams. Each statement is a transaction
-- of its own: it must be committed before the event is sent.

-- name: find_request
select r.digest, r.partition, r.search_from, r.attempts, r.record_offset,
    r.sent_until < clock_timestamp() as is_over, (
        select s.send_seconds from {schema}.streams s where s.topic = r.topic
    ), r.remembered_at
from {schema}.requests r
where r.topic = %(topic)s and r.id = %(id)s

-- name: add_request
-- Of several at once, one adds it; the others wait for its answer.
insert into {schema}.requests (topic, id, digest, partition, search_from, sent_until)
values (
    %(topic)s, %(id)s, %(digest)s, %(partition)s, %(search_from)s,
    clock_timestamp() + make_interval(secs => %(seconds)s::float8)
)
on conflict do nothing
returning attempts

-- name: take_request
-- Take over from a sender whose time is over, or go on after the search.
update {schema}.requests
set attempts = attempts + 1, partition = %(partition)s, search_from = %(search_from)s,
    sent_until = clock_timestamp() + make_interval(secs => %(seconds)s::float8)
where topic = %(topic)s and id = %(id)s and attempts = %(attempts)s
    and record_offset is null
returning attempts

-- name: answer_request
-- The first place counts, so that all who ask get one answer.
update {schema}.requests
set partition = case when record_offset is null then %(partition)s::int else partition end,
    record_offset = coalesce(record_offset, %(offset)s::bigint)
where topic = %(topic)s and id = %(id)s
returning partition, record_offset

-- name: forget_request
-- Kafka has refused the event, so nothing of it is in the topic.
delete from {schema}.requests
where topic = %(topic)s and id = %(id)s and attempts = %(attempts)s
    and record_offset is null

-- name: read_next_offsets
-- How far these groups have handled a partition, and of which topic; no row where one
-- has not begun.
select o.next_offset, o.topic_id
from {schema}.offsets o
where o.topic = %(topic)s and o.partition = %(partition)s
    and o.consumer_group = any (%(groups)s::text[]) and o.next_offset is not null

-- name: forget_requests
-- The clock is read once, and the oldest come first: only so the index by age is used, and
-- the young ones are not read.
with forgotten as (
    delete from {schema}.requests where ctid = any (array(
        select r.ctid from {schema}.requests r
        where r.remembered_at
            < (select clock_timestamp() - make_interval(secs => %(seconds)s::float8))
        order by r.remembered_at
        limit %(rows)s
        for update skip locked
    ))
    returning id
)
select count(*) from forgotten
