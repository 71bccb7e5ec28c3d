"""The rules for migrations: the last release still works, and no pod waits long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory

from jobs_lib.errors import SchemaVersionError
from jobs_lib.postgres import revisions
from jobs_lib.postgres.revisions import known_versions, migrations_path

WRITTEN = {"jobs", "claims", "discarded", "history", "origins", "processes", "outbox"}
"""Tables that pods write to all the time."""
TAKES_AWAY = re.compile(
    # Dropping or replacing a check only allows more than before.
    r"\bdrop (?!default|not null|constraint \w+_check\b)|\brename\b|\bset not null\b"
)
SMALL = re.compile(
    r"do \$small\$\s*begin\s*if pg_relation_size\('\w+'\) < \d{1,8} then"
    r"[^$]*?end if;\s*end\s*\$small\$;"
)
REVISIONS = list(ScriptDirectory(str(migrations_path())).walk_revisions())[::-1]


def breaches(upgrade: str) -> list[str]:
    """Return the rules that a revision's SQL breaks."""
    # The statements of a function do not run when it is made.
    code = re.sub(r"--.*|\$function\$[\s\S]*?\$function\$", "", upgrade).lower()
    # What is only done while the table is small takes no time.
    code = SMALL.sub("", code)
    # No pod uses a table yet that the same revision makes.
    written = WRITTEN - set(re.findall(r"\bcreate table (\w+)", code))
    found = []
    if (away := TAKES_AWAY.search(code)) and "compatible_from" not in code:
        found.append(f"takes away ({away[0]}) and does not raise compatible_from")
    # To change storage parameters blocks neither readers nor writers.
    altered = set(re.findall(r"\balter table (?:only )?(\w+)\b(?! set \()", code))
    altered &= written
    if len(altered) > 1:
        found.append(f"locks {', '.join(sorted(altered))} at once")
    indexed = (
        set(re.findall(r"\bcreate (?:unique )?index \w+ on (\w+)", code)) & written
    )
    if indexed:
        found.append(f"makes an index on {', '.join(indexed)}, which stops who writes")
    return found


@pytest.mark.parametrize("revision", REVISIONS, ids=lambda one: one.revision)
def test_a_revision_says_what_it_locks(revision):
    assert re.search(r"^Locks: ", revision.module.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("revision", REVISIONS, ids=lambda one: one.revision)
def test_a_revision_leaves_the_release_before_at_work(revision):
    assert breaches(revision.module.UPGRADE) == []


@pytest.mark.parametrize(
    ("upgrade", "told"),
    [
        ("alter table jobs drop column headers;", "takes away"),
        ("alter table jobs rename payload to data;", "takes away"),
        ("alter table jobs add a int; alter table outbox add a int;", "jobs, outbox"),
        ("create index of_type on jobs (type);", "index on jobs"),
    ],
)
def test_statements_that_would_stop_pods_are_found(upgrade, told):
    assert [told in breach for breach in breaches(upgrade)] == [True]


def test_statements_inside_a_function_are_not_counted_as_the_revisions():
    made = "create function f() as $function$ begin drop table day; end $function$;"
    assert breaches(made) == []
    assert breaches(f"{made} drop table jobs; {made}") != []


def test_an_index_on_a_table_of_the_same_revision_is_allowed():
    index = "create index of_type on jobs (type);"
    assert breaches(f"create table jobs (id int); {index}") == []
    assert breaches(f"create table others (id int); {index}") != []


def test_an_index_that_is_only_made_while_the_table_is_small_is_allowed():
    index = "create index of_type on jobs (type);"
    block = "do $small$ begin if {} then " + index + " end if; end $small$;"
    assert breaches(block.format("pg_relation_size('jobs') < 67108864")) == []
    assert breaches(block.format("pg_relation_size('jobs') < 6710886400")) != []
    assert breaches(block.format("true")) != []


def test_versions_sort_in_their_order_and_are_called_as_their_files():
    for number, revision in enumerate(REVISIONS, 1):
        # `check_version` compares them as text; Alembic stores 32 characters.
        assert re.fullmatch(rf"{number:04}_[a-z_]+", revision.revision)
        assert len(revision.revision) <= 32
        assert Path(revision.path).stem == revision.revision


def test_storage_parameters_stop_no_pod():
    some = "alter table jobs set (fillfactor = 90); alter table outbox add a int;"
    assert breaches(some) == []


def test_the_revisions_are_found_without_alembic():
    assert known_versions() == [one.revision for one in REVISIONS]
    head = ScriptDirectory(str(migrations_path())).get_current_head()
    assert known_versions()[-1] == head


def test_a_folder_without_revisions_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(revisions, "migrations_path", lambda: tmp_path)
    with pytest.raises(SchemaVersionError, match=f"no migrations lie in {tmp_path}"):
        known_versions()


def test_pages_name_only_migrations_that_there_are():
    root = Path(__file__).parents[2]
    known = {one.revision for one in REVISIONS}
    assert find_named(f"as `{known_versions()[0]}` says") <= known
    assert not find_named("as `0001_gone` says") <= known
    for page in [root / "CHANGELOG.md", *root.glob("docs/**/*.md")]:
        assert find_named(page.read_text(encoding="utf-8")) <= known, page


def find_named(text: str) -> set[str]:
    """The migrations that a text names."""
    return set(re.findall(r"`(\d{4}_[a-z_]+)`", text))
