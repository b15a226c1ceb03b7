"""`python -m impress_sglang.cli`: the same as `impress`."""

from impress_sglang.cli.main import main

raise SystemExit(main())
