-- The table of profiles.

create table profiles (
    payment int primary key,
    payer text not null,
    payments int not null,       -- how many the payer had made by then
    cents bigint not null        -- and their sum
);

create index on profiles (payer, payment);
