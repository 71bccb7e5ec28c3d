-- The tables of read models. A block of records becomes one statement for each kind of
-- change. {incoming} is its records: one array for each column, as text, which costs
-- the client the least and needs no temporary table. Each has the columns record_key
-- (text), row_key (of the table's type), version, record_offset, appended_ms and those
-- of the row. No key is in {incoming} twice.

-- part: has_not_ended
-- Whether nothing that is known of its key is newer than the record r, beside the row.
not exists (
    select from {schema}.model_keys k
    where k.model = %(model)s and k.key = r.record_key
        and case when k.version is not null
        -- The key ended with that version, or with a newer one.
        then k.version > r.version or (k.version = r.version and k.of_equal)
        -- The last record had no version, and the places decide. In another partition
        -- that is by the time of a clock: versions are better, if the row has one now.
        else not ({is_newer}) and (
            (k.topic_id, k.partition) is not distinct from
                (%(topic_id)s::uuid, %(partition)s::int)
            or not exists (
                select from {table} t
                where t.{key} = r.row_key and t.version is not null
            )
        ) end
)

-- part: is_newer
-- Whether the record r is newer than what is known of its key, by their places. Offsets
-- are compared within one partition of one topic. Else the times decide, and where they
-- are equal the record that is applied later.
case when (k.topic_id, k.partition) is not distinct from
    (%(topic_id)s::uuid, %(partition)s::int)
then r.record_offset > coalesce(k.record_offset, -1)
else to_timestamp(r.appended_ms / 1000.0) >= coalesce(k.appended_at, '-infinity') end

-- part: may_be_written
-- The same, or the very record that is known: a re-synchronisation writes it again.
{is_newer_than_known} or (
    %(again)s and (k.topic_id, k.partition, k.record_offset) is not distinct from
        (excluded.topic_id, excluded.partition, excluded.record_offset)
)

-- part: is_newer_than_known
-- The same where a key is noted: then k is the row that is there, and r is excluded.
case when (k.topic_id, k.partition) is not distinct from
    (excluded.topic_id, excluded.partition)
then excluded.record_offset > coalesce(k.record_offset, -1)
else excluded.appended_at >= coalesce(k.appended_at, '-infinity') end

-- part: place_of_key
topic_id = excluded.topic_id, partition = excluded.partition,
record_offset = excluded.record_offset, appended_at = excluded.appended_at,
noted_at = excluded.noted_at

-- template: upsert_states
-- States with versions. A newer version replaces a row.
with incoming as ({incoming})
insert into {table} as kept ({key}, version{columns})
select r.row_key, r.version{values} from incoming r
where {has_not_ended}
on conflict ({key}) do update set version = excluded.version{changes}
where kept.version < excluded.version or kept.version is null

-- template: restate_states
-- The same for a re-synchronisation: a state of the row's own version is written, too.
-- Rows that are right already are left out, so that they are neither written nor locked.
with incoming as ({incoming})
insert into {table} as kept ({key}, version{columns})
select r.row_key, r.version{values} from incoming r
where {has_not_ended} and not exists (
    select from {table} t
    where t.{key} = r.row_key and (
        t.version > r.version
        or (t.version = r.version and {same})
    )
)
on conflict ({key}) do update set version = excluded.version{changes}
where kept.version <= excluded.version or kept.version is null

-- template: remove_ended_meanwhile
-- The service may end a key while `restate_states` waits for its row. That statement does
-- not see the end yet, and makes the row anew. This one sees it, and takes back what the
-- block has written. A live consumer needs no such look: nobody else reads its partition.
with incoming as ({incoming}), ended as materialized (
    -- Hardly ever one: the table is not even looked at.
    select r.row_key, r.version
    from incoming r
    join {schema}.model_keys k on k.model = %(model)s and k.key = r.record_key
    where case when k.version is not null
    then k.version > r.version or (k.version = r.version and k.of_equal)
    -- In another partition a newer version may have come since.
    else k.is_gone and k.record_offset >= r.record_offset
        and (k.topic_id, k.partition) is not distinct from
            (%(topic_id)s::uuid, %(partition)s::int)
    end
)
delete from {table} t using ended e
where t.{key} = e.row_key and t.version = e.version
    and t.xmin = pg_current_xact_id()::xid

-- template: rewrite_states
-- The records are left to the service, which tells of newer versions. It passes those of
-- the row's own version, whose row a re-synchronisation writes here. It makes no row.
with incoming as ({incoming})
update {table} t set {rewritten}
from incoming r
where t.{key} = r.row_key and t.version = r.version and not ({same})

-- template: remove_ended
-- Ends with versions. If an end and a state have equal versions, the first one received
-- is the older. The end notes whether it removed such a state (`of_equal`). If it did, a
-- repeat of that state stays out. If not, the state is of a key that came back, and a
-- repeat of the end leaves it there.
with incoming as ({incoming}), removed as (
    delete from {table} t using incoming r
    where t.{key} = r.row_key and (
        t.version < r.version
        or (t.version = r.version and not exists (
            select from {schema}.model_keys k
            where k.model = %(model)s and k.key = r.record_key
                and k.version >= r.version
        ))
        or (t.version is null and not exists (
            select from {schema}.model_keys k
            where k.model = %(model)s and k.key = r.record_key and not ({is_newer})
        ))
    )
    returning r.record_key, t.version
)
insert into {schema}.model_keys as k (
    model, key, version, of_equal, topic_id, partition, record_offset, appended_at
)
select %(model)s, r.record_key, r.version,
    exists (
        select from removed d
        where d.record_key = r.record_key and d.version = r.version
    ),
    %(topic_id)s, %(partition)s, r.record_offset, to_timestamp(r.appended_ms / 1000.0)
from incoming r
on conflict (model, key) do update set version = excluded.version,
    of_equal = excluded.of_equal, is_gone = true, {place_of_key}
where k.version < excluded.version or (k.version is null and {is_newer_than_known})

-- template: upsert_placed
-- States without versions: the places decide. The row's version is null.
with incoming as ({incoming}), noted as (
    insert into {schema}.model_keys as k (
        model, key, is_gone, topic_id, partition, record_offset, appended_at
    )
    select %(model)s, r.record_key, false, %(topic_id)s, %(partition)s,
        r.record_offset, to_timestamp(r.appended_ms / 1000.0)
    from incoming r
    on conflict (model, key) do update set version = null, of_equal = false,
        is_gone = false, {place_of_key}
    where {may_be_written}
    returning key
)
insert into {table} as kept ({key}, version{columns})
select r.row_key, null{values} from incoming r join noted n on n.key = r.record_key
on conflict ({key}) do update set version = null{changes}

-- template: remove_placed
-- Ends without versions: each ends whatever version its key has, unless it is older than
-- what is known of the key.
with incoming as ({incoming}), noted as (
    insert into {schema}.model_keys as k (
        model, key, topic_id, partition, record_offset, appended_at
    )
    select %(model)s, r.record_key, %(topic_id)s, %(partition)s, r.record_offset,
        to_timestamp(r.appended_ms / 1000.0)
    from incoming r
    on conflict (model, key) do update set version = null, of_equal = false,
        is_gone = true, {place_of_key}
    where {is_newer_than_known}
    returning key
)
delete from {table} t using incoming r join noted n on n.key = r.record_key
where t.{key} = r.row_key

-- name: read_column_types
-- Without the modifiers of types: a cast to varchar(3) cuts a text short, and only an
-- assignment refuses it.
select a.attname, format_type(a.atttypid, -1)
from pg_attribute a
where a.attrelid = to_regclass(%(table)s) and a.attnum > 0 and not a.attisdropped

-- name: note_keys
-- Returns the keys whose record is newer than what is known of them. Where the versions
-- are beside the tables, the places also tell an end from a state of equal version.
with incoming as (
    select * from unnest(
        %(record_key)s::text[], %(version)s::bigint[], %(record_offset)s::bigint[],
        %(appended_ms)s::bigint[], %(is_gone)s::boolean[]
    ) as u(record_key, version, record_offset, appended_ms, is_gone)
)
insert into {schema}.model_keys as k (
    model, key, version, is_gone, topic_id, partition, record_offset, appended_at
)
select %(model)s, r.record_key, r.version, r.is_gone, %(topic_id)s, %(partition)s,
    r.record_offset, to_timestamp(r.appended_ms / 1000.0)
from incoming r
on conflict (model, key) do update set version = excluded.version,
    is_gone = excluded.is_gone, of_equal = false, {place_of_key}
where case when k.version is not null and excluded.version is not null
    then k.version < excluded.version or (
        k.version = excluded.version and case when k.is_gone = excluded.is_gone
            -- A re-synchronisation writes the very state that is known again.
            then %(again)s else {is_newer_than_known} end
    )
    else {may_be_written} end
returning k.key

-- name: find_same_states
-- The keys that are left to the service, and have a state of the record's very version.
-- The lock lets the service wait, which may write a newer one.
select k.key
from {schema}.model_keys k
join unnest(%(record_key)s::text[], %(version)s::bigint[]) as r(key, version)
    using (key, version)
where k.model = %(model)s and not k.is_gone
for no key update of k

-- template: delete_rows
with incoming as ({incoming})
delete from {table} t using incoming r where t.{key} = r.row_key

-- template: upsert_rows
with incoming as ({incoming})
insert into {table} ({key}{columns}) select r.row_key{values} from incoming r
on conflict ({key}) do update set {key} = excluded.{key}{changes}

-- template: insert_rows
with incoming as ({incoming})
insert into {table} ({key}{columns}) select r.row_key{values} from incoming r

-- template: digest_rows
-- What the rows of some keys hold, to see afterwards whether it has changed.
with incoming as ({incoming})
select r.record_key, md5(string_agg(row({read})::text, ',' order by row({read})::text))
from {table} t join incoming r on t.{key} = r.row_key
group by r.record_key

-- template: read_row_versions
-- The version of a row, or of the end of its key, whichever is higher.
with incoming as ({incoming})
select r.record_key, greatest(t.version, k.version)
from incoming r
left join {table} t on t.{key} = r.row_key
left join {schema}.model_keys k on k.model = %(model)s and k.key = r.record_key
where greatest(t.version, k.version) is not null

-- name: read_noted_versions
select k.key, k.version
from {schema}.model_keys k
where k.model = %(model)s and k.key = any (%(record_key)s::text[])
    and k.version is not null
