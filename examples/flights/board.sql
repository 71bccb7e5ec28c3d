-- The table of the board. It has the same states as the topic aircraft-state.

create table aircraft_rm (
    tail text primary key,
    airport text not null,
    flights int not null,
    minutes_late int not null,
    version bigint not null
);
