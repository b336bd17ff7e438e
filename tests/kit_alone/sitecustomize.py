"""Imported by every interpreter that has this folder in PYTHONPATH: of the project only the kit is left."""

import sys

EXAMPLE = ("mobilenetv3_ref", "mobilenetv3_paddle", "mobilenetv3_common", "mobilenetv3_proof", "maintenance", "faq")
sys.modules.update(dict.fromkeys(EXAMPLE))  # None: importing it fails
