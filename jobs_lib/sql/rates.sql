-- Rate limits: one bucket for all pods.

-- name: take_starts
-- Types without a rate never ask; a type with a rate asks a few times a second.
select granted, seconds from {schema}.take_starts(
    %(type)s::text, %(per_second)s::float8, %(capacity)s::float8, %(wanted)s::int
)
