-- The tables of the example, beside those of the library.

create table countries (code text primary key);
insert into countries values ('AT'), ('CH'), ('DE'), ('FR'), ('IT');

-- Follows the topic; the processor alone writes it.
create table tenants_rm (
    id text primary key,
    version bigint,
    email text not null,
    name text not null,
    country text not null,
    account text not null
);
create index on tenants_rm (country);

-- The tenants that are registered at the provider, or will be.
create table registrations (
    tenant text primary key,
    registered_at timestamptz
);
