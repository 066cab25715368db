"""The audit: it watches any loop and changes none. `gradsync` itself offers it; no other room imports it.

`audit.py` is the context manager, `watch.py` keeps the books, `backward.py` knows when a backward begins and ends,
`engines.py` reads what each engine has synchronised, and `report.py` tells it in numbers and sentences.
"""

from gradsync._audit.audit import audit
from gradsync._audit.report import AuditReport

__all__ = ["AuditReport", "audit"]
