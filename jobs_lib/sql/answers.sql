-- Answers from read models: what they are worth, and entities that updates have returned.
-- Callers of any driver run these: all parameters are text, and so are all results.
-- %(model)s is the first table of the read model. Where versions of it were said, they are
-- about the one that readers see; else about %(own)s and %(group)s, which the caller's
-- declaration names.

-- part: seen_group
coalesce((select r.consumer_group from {schema}.read_models r where {is_seen}), %(group)s::text)

-- part: seen_topic
coalesce((select r.topic from {schema}.read_models r where {is_seen}), %(topic)s::text)

-- part: seen_keys
-- By which name the keys are known. Each version has its own, as `name_model` says.
coalesce((
    select case r.version when 1 then r.model
        else regexp_replace(r.model, '(_rm)?$', '_v' || r.version || '\1') end
    from {schema}.read_models r where {is_seen}
), %(own)s::text)

-- part: is_seen
r.model = %(model)s::text and r.is_current

-- name: read_valid_since
-- How far the read model is, by partition: everything before `next_offset` is in it. Where
-- that is null, nothing of this topic is, and the time is one of an earlier topic.
select o.partition::text, o.next_offset::text,
    case when o.next_offset is not null
        then floor(extract(epoch from o.appended_at) * 1000)::bigint::text end
from {schema}.offsets o
where o.consumer_group = {seen_group} and o.topic = {seen_topic}
    and {is_of_topic}
order by o.partition

-- template: known_on_rows
-- The version that the read model has of the key of a: one look into an index for each.
-- A join would be planned for few keys, and be slow for a thousand.
greatest(
    (select max(t.version) from {table} t where t.{key} = a.key::{key_type}),
    (
        select k.version from {schema}.model_keys k
        where k.model = {seen_keys} and k.key = a.key
    )
)

-- template: gone_on_rows
-- Whether it has that version as an end.
not exists (select from {table} t where t.{key} = a.key::{key_type})

-- template: known_beside
-- The same where the versions are beside the tables.
(
    select k.version from {schema}.model_keys k
    where k.model = {seen_keys} and k.key = a.key
)

-- template: gone_beside
(
    select k.is_gone from {schema}.model_keys k
    where k.model = {seen_keys} and k.key = a.key
)

-- template: read_known
select ({known})::text, ({is_gone})::text, current_setting('transaction_isolation')
from (select %(key)s::text as key) a

-- part: has_expired
-- Whether the entry a is old enough, and the read model has caught up with the time at
-- which it was put: no partition that was read, or that stands still, is behind that.
(
    a.put_at < clock_timestamp() - make_interval(secs => %(seconds)s::float8)
    and not exists (
        select from {schema}.offsets o
        where o.consumer_group = a.consumer_group and o.topic = a.topic
            and (o.next_offset is not null or o.failed_offset is not null)
            and coalesce(o.appended_at, '-infinity') < a.put_at
            and {is_of_topic}
    )
)

-- template: read_newer
-- The entries, and those given, whose version the read model does not have yet. The
-- values of those that are given stay with the caller.
select a.key, a.version::text, a.is_stored, a.value
from (
    select a.key, a.version, 'true', a.value
    from {schema}.answers a
    where a.model = %(model)s::text and not {has_expired}
    union all
    select g.key, g.version, 'false', null
    from unnest(%(keys)s::text[], %(versions)s::bigint[]) as g(key, version)
) a(key, version, is_stored, value)
where coalesce({known} < a.version, true)

-- template: put_answer
-- Put an entry, unless there is one of an equal or newer version. Some of the others go
-- with it: those of versions that the read model has, those that have expired, and the
-- oldest ones of too many.
with others as (
    select a.key, a.version,
        {has_expired} or coalesce({known} >= a.version, false) as serves_nobody,
        row_number() over newest as place, sum(a.bytes) over newest as bytes
    from {schema}.answers a
    where a.model = %(model)s::text and a.key <> %(key)s::text
    window newest as (order by a.put_at desc, a.key)
), useless as (
    select o.key, o.version
    from others o
    where (
            o.serves_nobody or o.place >= %(most)s::int
            or o.bytes + %(bytes)s::int > %(most_bytes)s::int
        )
        -- Under a stricter isolation, an entry that another transaction has removed
        -- meanwhile would make this one fail.
        and current_setting('transaction_isolation') = 'read committed'
    order by o.place desc
    limit 100
), removed as (
    delete from {schema}.answers where ctid = any (array(
        select a.ctid
        from {schema}.answers a join useless u on u.key = a.key and u.version = a.version
        where a.model = %(model)s::text
        for update of a skip locked
    ))
)
insert into {schema}.answers as a (
    model, key, version, value, bytes, consumer_group, topic
)
select %(model)s::text, %(key)s::text, %(version)s::bigint, %(value)s::text,
    %(bytes)s::int, {seen_group}, {seen_topic}
-- Of the table's type: a key that cannot be one would fail everybody who reads it later.
where %(key)s::text::{key_type} is not null
on conflict (model, key) do update set version = excluded.version,
    value = excluded.value, bytes = excluded.bytes, topic = excluded.topic,
    consumer_group = excluded.consumer_group, put_at = excluded.put_at
where a.version < excluded.version
returning 'true'

-- template: forget_reached
-- Entries whose versions the read model has, also where no later put removes them.
delete from {schema}.answers where ctid = any (array(
    select a.ctid from {schema}.answers a
    where a.model = %(model)s::text and {known} >= a.version
    for update skip locked
))

-- name: forget_expired
with forgotten as (
    delete from {schema}.answers where ctid = any (array(
        select a.ctid from {schema}.answers a
        where {has_expired}
        limit %(rows)s
        for update skip locked
    ))
    returning key
)
select count(*) from forgotten
