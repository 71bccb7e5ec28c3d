-- The tables of screening, which are made like those of detection.

create table screened (
    payment int not null,
    times int                    -- null: the other service did not know it
);

create table missing (service text not null, payment int not null);
