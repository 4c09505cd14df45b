"""Takes a list of another tool for a plan, where a plan.json may be given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.imports.entries import Form
from bisect_trt.imports.mapping import ImportedList, Status, entries
from bisect_trt.imports.read import holds_plan, import_list
from bisect_trt.model.lifted import SourceModel
from bisect_trt.runners.tensorrt.network import parsed_network
from bisect_trt.steps.saved_plan import SavedPlan, read_plan

FUNCTIONS = (
    "the model's functions are written out here; names of layers inside them may differ from "
    "TensorRT's"
)
"""Said where TensorRT may have other names than the parser gives to the model as it is read."""


def import_plan(
    given: str,
    source: SourceModel,
    *,
    form: Form | None = None,
    base: Precision | None = None,
    module: str | None = None,
) -> ImportedList:
    """The plan that a list says for the layers of a model.

    Args:
        given: a file, or options of trtexec or AutoCast as text.
        source: the model.
        form: the form of the list; found by its content if None.
        base: the precision of the other layers; the list's own if None.
        module: ``tensorrt`` or ``tensorrt_rtx``, whose parser is asked; an installed one if None.

    Raises:
        BadInputError: it cannot be read, names no layer of the model, or is a mixed model at
            another precision than ``base``.
    """
    found = _imported(given, source, form=form, base=base, module=module)
    if found.form is Form.MIXED and base is not None:
        check_asked(base, found.plan.base, found.where)
    return found


def _imported(
    given: str,
    source: SourceModel,
    *,
    form: Form | None = None,
    base: Precision | None,
    module: str | None,
) -> ImportedList:
    """What :func:`import_plan` gives, with a mixed model at any precision."""
    if source.lifted is not None:
        reduced = source.lifted.precision.value.upper()
        raise BadInputError(
            f"{source.model.name}: is {reduced} in the source already; give the FP32 model that "
            "the list was made for"
        )
    parser = partial(parsed_network, source.graph.proto, module)
    found = import_list(given, source.graph, source.model.name, parser=parser, form=form, base=base)
    if source.model.written_out and found.form is not Form.MIXED:
        return found.with_note(FUNCTIONS)
    return found


def older_plan(
    path: Path,
    load: Callable[[], SourceModel],
    module: str | None = None,
    base: Precision | None = None,
) -> SavedPlan:
    """The plan of a plan.json, of a run's folder, or of another tool's list.

    Args:
        path: the file or folder.
        load: gives the model; called for a list only.
        module: ``tensorrt`` or ``tensorrt_rtx``, whose parser is asked; an installed one if None.
        base: the precision of the layers that a list of names does not name; the list's own if
            None. A mixed model has its own.

    Raises:
        BadInputError: it cannot be read, or is neither.
    """
    if not path.is_file() or holds_plan(path):
        return read_plan(path)
    found = _imported(str(path), load(), base=base, module=module)
    return SavedPlan(found.plan, path, imported=found)


def check_asked(asked: Precision, its: Precision, name: str) -> None:
    """Refuses a mixed model at another precision than ``asked``, an option that was given.

    Raises:
        BadInputError: ``its`` precision differs; ``name`` is the model's.
    """
    if asked is not its:
        raise BadInputError(
            f"--precision {asked.value}: {name} is {its.value.upper()}; leave the option out"
        )


def import_notes(found: ImportedList) -> list[str]:
    """Sentences on an imported list: the counts, one entry of each kind, and its notes."""
    notes = [f"{found.where}: {found.form.value}, {found.sentence}"]
    for status in (Status.WIDENED, Status.REFUSED):
        rows = found.rows_of(status)
        if rows:
            many, first = entries(len(rows)), rows[0]
            notes.append(f"{many} {status.value}, such as {first.entry.text[:80]!r}: {first.said}")
    return [*notes, *found.notes]
