"""Imported by every interpreter that has this folder in PYTHONPATH: only the kit and sturdyio are left."""

import sys


class _Absent:
    """Finds nothing for a package of the project's own, before anybody else looks for it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("mobilenetv3_") or name.partition(".")[0] == "maintenance":
            raise ModuleNotFoundError(f"No module named {name!r}: only portproof and sturdyio are here", name=name)


sys.meta_path.insert(0, _Absent)
