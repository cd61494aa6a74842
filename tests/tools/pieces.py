"""What `begin_run` makes one after the other, for tests that want one piece of a run."""
from credit_rl import setup


def origin_of(config):
    "The weights that a run of these settings comes from."
    return setup.origin_of(config)


def setup_of(config):
    "Questions, search and model of a run of these settings."
    return setup.make_setup(config, setup.origin_of(config), lambda line: None)


def learner_of(config, model):
    "The learner of a run of these settings."
    return setup.make_learner(config, setup.origin_of(config), model)
