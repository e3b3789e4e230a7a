"""Registry of the studies. To add one, write a module with a `STUDY` and add its name here."""

from importlib import import_module
from pathlib import Path

from vitkit.core.errors import UnknownNameError, did_you_mean
from vitkit.studies.study import Study
from vitkit.studies.user_study import load_study

NAMES = ("table8", "masked", "fig4", "fig5", "fig9", "fig8", "fig3", "table5", "table7", "axial", "fig7")


def find_study(name: str) -> Study:
    """Return a study by its name, or that of a TOML file."""
    if name.endswith(".toml"):
        return load_study(Path(name))
    if name not in NAMES:
        hint = did_you_mean(name, NAMES) or "vitkit study lists the studies; a study of your own is a TOML file"
        raise UnknownNameError(f"no study is called {name}", hint=hint)
    study: Study = import_module(f"vitkit.studies.{name}").STUDY
    return study
