"""What `begin_run` makes one after the other, for tests that want one piece of a run."""
from credit_rl import setup
from credit_rl.settings import settings_of


def origin_of(config):
    "The weights that a run of these settings comes from."
    s = settings_of(config)
    return setup.origin_of(s.course, s.acting, s.host, s.critic)


def setup_of(config):
    "Questions, search and model of a run of these settings."
    s = settings_of(config)
    return setup.make_setup(s.task, s.acting, origin_of(config), config.seed, lambda line: None)


def learner_of(config, model):
    "The learner of a run of these settings."
    return setup.make_learner(settings_of(config), origin_of(config), model)
