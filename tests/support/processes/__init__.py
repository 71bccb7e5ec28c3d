"""Apps of tests that run in processes of their own, each with a name.

`start_process("relay", url, topic="states")` of `tests/conftest.py` starts one.
`tests.support.processes.kinds` makes a function such a name.
"""
