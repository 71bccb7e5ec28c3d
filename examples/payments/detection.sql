-- The tables of detection. That of the checks has no unique key on purpose: a payment
-- that was checked twice shows here.

create table checked (
    payment int not null,
    partition int not null,
    record_offset bigint not null,
    times int,                   -- null: the other service did not know it
    payments int,
    cents bigint,
    suspicious bool not null
);

-- What an API did not know when it was asked.
create table missing (service text not null, payment int not null);
