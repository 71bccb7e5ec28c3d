-- Limits of rate, one bucket for all pods.

-- name: take_starts
-- Types without a limit never ask, and a type with one asks a few times a second.
select granted, seconds from {schema}.take_starts(
    %(type)s::text, %(per_second)s::float8, %(capacity)s::float8, %(wanted)s::int
)
