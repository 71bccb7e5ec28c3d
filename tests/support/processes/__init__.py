"""Apps of tests that run in a process of their own, each under a name.

`start_process("relay", url, topic="states")` of `tests/conftest.py` starts one. By
`tests.support.processes.kinds` a function becomes such a name.
"""
