-- The table of relations.

create table relations (
    payment int primary key,
    payer text not null,
    payee text not null,
    times int not null           -- how often the payer had paid the payee by then
);

create index on relations (payer, payee, payment);
