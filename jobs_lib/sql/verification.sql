-- Compare the keys and versions of two tables, in two databases. {rows} gives the columns
-- key (text) and version (bigint) of one of them.

-- part: in_buckets
-- Each row with the bucket of its key, and a digest of both. MD5 gives the same numbers
-- in every version of PostgreSQL.
with given as ({rows}), placed as (
    select key, version,
        ('x' || substr(md5(key), 1, 4))::bit(16)::int %% %(buckets)s as bucket,
        ('x' || substr(md5(key || ' ' || coalesce(version::text, '')), 1, 16)
            )::bit(64)::bigint as digest
    from given
)

-- template: digest_buckets
{in_buckets}
select bucket, count(*), bit_xor(digest) from placed group by bucket

-- template: open_buckets
{in_buckets}
select bucket, key, version from placed where bucket = any (%(opened)s::int[])

-- template: list_buckets
-- Digests and keys of one snapshot.
{in_buckets}
select bucket, count(*), bit_xor(digest), json_agg(json_build_array(key, version) order by key)
from placed group by bucket order by bucket

-- template: list_side_keys
-- The keys as a source has them: its database writes a UUID with hyphens.
select k.key::{key_type}::text as key, k.version from {schema}.model_keys k
where k.model = {model} and not k.is_gone
