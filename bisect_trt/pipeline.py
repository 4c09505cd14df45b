"""The main job as a list of stations:

load -> reference -> baselines -> triage -> bisect -> verify on the engine -> report
"""

from __future__ import annotations

import time

from bisect_trt.core.observer import Observer
from bisect_trt.report.result import Result
from bisect_trt.report.summary import assemble, assemble_partial
from bisect_trt.report.write import write_report
from bisect_trt.stations.job import Job
from bisect_trt.stations.settings import Settings
from bisect_trt.stations.triage import Cause, Diagnosis


def run(settings: Settings, observer: Observer | None = None) -> Result:
    """The main job. Raises :class:`~bisect_trt.core.errors.BisectError` for what the user can
    mend.
    """
    began = time.perf_counter()
    job = Job(settings, observer or Observer())
    try:
        job.folder.discard("run.json")
        diagnosis = job.triage()
        found = job.bisect() if diagnosis.searchable else None
        result = assemble(job, diagnosis, found, time.perf_counter() - began)
        write_report(
            result, job.material.model.proto, job.folder, rewritten=bool(job.material.rewritten)
        )
        return result
    except KeyboardInterrupt:
        partial = assemble_partial(job, time.perf_counter() - began)
        if partial is not None:
            write_report(
                partial,
                job.material.model.proto,
                job.folder,
                rewritten=bool(job.material.rewritten),
            )
        raise
    finally:
        job.close()


def compare(settings: Settings, observer: Observer | None = None) -> Result:
    """The error tables of the baselines and layers, without a search; writes layers.csv,
    outputs.csv and the rest.
    """
    began = time.perf_counter()
    job = Job(settings, observer or Observer(), "-compare")
    try:
        diagnosis = job.baselines_only() or Diagnosis(
            Cause.ACCUMULATION, "Not searched: error tables only."
        )
        result = assemble(job, diagnosis, None, time.perf_counter() - began)
        for name in ("layers", "outputs"):
            job.folder.write(
                f"{name}.csv", getattr(result, name).to_csv(index=False, lineterminator="\n")
            )
        return result
    finally:
        job.close()
