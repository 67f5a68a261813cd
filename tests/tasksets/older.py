"""An environment for verifiers before 0.4, which does not even load with 0.4."""

import verifiers


class Environment(verifiers.SingleTurnEnv):
    pass
