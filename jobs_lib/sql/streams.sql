-- Whether streams may be published to, and the command that stops their publishers.

-- part: stopped
-- A command that has died stops nobody after its time. Nor does one from before the
-- server's clock was set back: its own next renewal fails likewise.
(s.renewed_at <= clock_timestamp() and s.stopped_until > clock_timestamp())

-- name: read_streams
select s.topic, s.send_seconds >= %(seconds)s::float8, coalesce({stopped}, false)
from {schema}.streams s
where s.topic = any (%(topics)s::text[])

-- name: note_streams
-- The time must be committed before the process reads whether it may publish: a command
-- that stops it afterwards then knows how long its events may take.
insert into {schema}.streams as s (topic, send_seconds)
select t.topic, %(seconds)s::float8 from unnest(%(topics)s::text[]) as t(topic)
order by t.topic
on conflict (topic) do update set send_seconds = excluded.send_seconds
where s.send_seconds < excluded.send_seconds

-- name: stop_stream
-- Of two commands one gets the row; the other waits for that, and finds it stopped.
insert into {schema}.streams as s (
    topic, send_seconds, grower, partitions, stopped_at, renewed_at, stopped_until
)
values (
    %(topic)s, %(seconds)s::float8, %(grower)s, %(partitions)s::int, clock_timestamp(),
    clock_timestamp(), clock_timestamp() + make_interval(secs => %(lease)s::float8)
)
on conflict (topic) do update set
    grower = excluded.grower, partitions = excluded.partitions,
    stopped_at = excluded.stopped_at, renewed_at = excluded.renewed_at,
    stopped_until = excluded.stopped_until
where not coalesce({stopped}, false)
returning topic

-- name: renew_stop
update {schema}.streams s set
    renewed_at = clock_timestamp(),
    stopped_until = clock_timestamp() + make_interval(secs => %(lease)s::float8)
where s.topic = %(topic)s and s.grower = %(grower)s and {stopped}
returning s.send_seconds

-- name: lower_send_seconds
-- It would never get shorter by itself: nobody knows which processes have ended.
update {schema}.streams set send_seconds = least(send_seconds, %(seconds)s::float8)
where topic = %(topic)s and grower = %(grower)s

-- name: open_stream
-- Who has not ended leaves the number of partitions: not all who publish may know them.
update {schema}.streams set
    grower = null, stopped_at = null, renewed_at = null, stopped_until = null,
    partitions = case when not %(has_ended)s then partitions end
where topic = %(topic)s and grower = %(grower)s

-- name: find_growth
select from {schema}.streams where topic = %(topic)s and partitions is not null

-- name: list_stopped
select s.topic, s.partitions, s.stopped_at,
    extract(epoch from s.stopped_until - clock_timestamp())::float8
from {schema}.streams s
where s.topic = any (%(topics)s::text[]) and {stopped}
