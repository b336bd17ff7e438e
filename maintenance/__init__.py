"""What maintainers run: checks, benchmarks, the writers of pages, and studies that were made once."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
