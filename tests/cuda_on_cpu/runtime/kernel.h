// All that generated code includes.
#pragma once
#include <type_traits>

#include "floats.h"
#include "integers.h"
#include "machine.h"
#include "memory.h"
#include "tensor.h"
#include "warp.h"
