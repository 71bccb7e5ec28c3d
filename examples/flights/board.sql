-- The table of the board, kept equal to the topic aircraft-state.

create table aircraft_rm (
    tail text primary key,
    airport text not null,
    flights int not null,
    minutes_late int not null,
    version bigint not null
);
