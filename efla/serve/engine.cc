#include "efla/serve/engine.h"
