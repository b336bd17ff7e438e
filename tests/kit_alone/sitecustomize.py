"""Imported by every interpreter that has this folder in PYTHONPATH: only the kit and sturdyio are left."""

import sys

EXAMPLE = ("mobilenetv3_ref", "mobilenetv3_paddle", "mobilenetv3_common", "mobilenetv3_proof", "maintenance")
sys.modules.update(dict.fromkeys(EXAMPLE))  # None: importing it fails
