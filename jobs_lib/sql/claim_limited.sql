-- What claims also read if a field of the payload limits a type. Each part is
-- empty in a plain query, and `x_limited` stands for `x` in `claim_limited` and the like.

-- part: read_value

-- part: read_value_limited
-- If a field of the payload limits a type: see `claim_limited`. It costs other claims
-- nothing.
, {value_of_field} as value, {unfull} as unfull

-- part: able_if_unfull

-- part: able_if_unfull_limited
and q.unfull

-- part: plain_if_unfull

-- part: plain_if_unfull_limited
and r.unfull

-- part: suspect_if_unfull

-- part: suspect_if_unfull_limited
-- Else it is passed over with the others of its value, and comes back like them.
and l.unfull

-- part: room

-- part: room_limited
, unfull

-- part: value

-- part: value_limited
, value

-- part: no_value

-- part: no_value_limited
, null

-- part: passed_for_value

-- part: passed_for_value_limited
union all
-- Passed over only because of their value: they come back when fewer of it wait.
select 10, l.origin, l.id, null, null, null, null, null, null, null, null, null, null,
    null, null, null, l.value
from (
    select origin, id, type, state, value, unfull from looked
    union all
    select origin, id, type, state, value, unfull from lanes
) l
where not l.unfull and l.state = 'available' and l.type = any (%(types)s::text[])

-- part: full_of_value
'{{}}'::bigint[] as full_ids, '{{}}'::text[] as full_values

-- part: full_of_value_limited
-- Rows passed over only because of their value, and those values.
array(select unnest(f.full_ids) from first f where f.full_ids is not null) as full_ids,
array(select unnest(f.full_values) from first f where f.full_ids is not null)
    as full_values

-- part: gather_full

-- part: gather_full_limited
, array_agg(r.id order by r.id) filter (where r.full) as full_ids
, array_agg(r.value order by r.id) filter (where r.full) as full_values

-- part: read_full

-- part: read_full_limited
, {value_of_field} as value
, j.state = 'available' and j.priority = 0
    and j.type <> all (%(skipped_types)s::text[]) and not ({unfull}) as full

-- part: unfull
true

-- part: unfull_limited
-- Leaves out a value if the most allowed jobs of it wait in memory. Rows that are passed
-- over for that come back by id, as `refilled`; so does a suspect whose turn it is. A hash
-- is used, because there may be very many of these values.
case when cardinality(%(full)s::text[]) = 0 then true else
    j.id = any (%(refilled)s::bigint[])
    or {value_of_field} not in (select unnest(%(full)s::text[]))
end

-- part: value_of_field
-- A digest stands for a value that is too long for the index of `slots`. No subquery saves
-- the second look at the field, since one for each row would cost more.
case when octet_length(j.payload ->> %(field)s::text) > 1000
    then 'sha256:' || encode(
        sha256(convert_to(j.payload ->> %(field)s::text, 'UTF8')), 'hex'
    )
    else coalesce(j.payload ->> %(field)s::text, '')
end
