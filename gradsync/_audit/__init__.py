"""The audit: it watches any loop and changes none. Nothing else in the package imports it.

`audit.py` is the context manager, `watch.py` the bookkeeping, `backward.py` knows where a backward begins and ends,
`engines.py` reads from each engine what it has synchronised, `report.py` says it in words.
"""

from gradsync._audit.audit import audit
from gradsync._audit.report import AuditReport

__all__ = ["AuditReport", "audit"]
