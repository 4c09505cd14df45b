"""``python -m bisect_trt`` is ``bisect-trt``."""

from bisect_trt.cli import main

if __name__ == "__main__":
    main(prog_name="bisect-trt")
