-- Whether a group has once read a topic to its end.

-- name: read_filling
-- Whether it has, and how far its partitions are.
select exists (
    select from {schema}.filled_topics t
    where t.consumer_group = %(group)s and t.topic = %(topic)s
), f.partition, f.next_offset
from (select) always
left join {schema}.offsets f on f.consumer_group = %(group)s and f.topic = %(topic)s

-- name: note_filled
insert into {schema}.filled_topics (consumer_group, topic)
values (%(group)s, %(topic)s)
on conflict do nothing
returning filled_at
