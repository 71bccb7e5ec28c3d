"""What is measured side by side: this library and others of its kind, by adapters.

Every adapter is a program of its own with the same commands, see ``adapter``. This
package and ``adapter`` need nothing but the standard library: the Python peers run in
an environment that does not have ours.
"""

from __future__ import annotations
