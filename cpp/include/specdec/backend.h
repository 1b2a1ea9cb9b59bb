// A backend: the table of operations over tensors that a step needs besides the model.
//
// Contract: an operation takes a struct of views and enqueues its work; one that a backend does not
// have is null. cpu_backend() is always there, find_backend("cuda") where a build and a device have
// it. A plug-in is a shared library that exports specdec_backend() and is opened by load_backend();
// one that was compiled against other headers is refused.
#pragma once

#include "backend/backend.h"
#include "backend/registry.h"
