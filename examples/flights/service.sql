-- The tables of the flights service.

create table aircraft (
    tail text primary key,
    flights int not null,
    airport text not null,       -- where it is
    delay int not null,          -- minutes late, over all its flights
    version bigint not null      -- one more with every change
);

-- Every flight that was handled. It has no unique key on purpose: a flight that was
-- handled twice shows here.
create table handled (
    flight int not null,
    tail text                    -- null: the aircraft is unknown
);
