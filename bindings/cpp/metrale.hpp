// metrale for C++17: a language model inside your own process.
//
//     auto model = metrale::model::load("model.gguf");
//     auto seq = metrale::seq::create(model);
//     auto text = metrale::text::create(model);
//     seq.prefill(model.tokenize("Once upon a time"));
//     for (metrale_token token : seq.tokens(64)) std::cout << text.push(token).text;
//
// Each noun of metrale.h is a class of the same name, which is moved and not copied, and frees its handle; what the header says
// of a function holds for the member of that name. Views (`std::string_view`, `metrale::span`) live as long as the header says.
//
// Errors are exceptions of the type `metrale::error`. With METRALE_EXPECTED defined, or without exceptions in the compiler, every
// call that can fail returns `metrale::expected<T>` instead, which has to be looked at.
//
// Callbacks are any function objects, and may throw: the call that they served fails in the library, which is left as the header
// says, and the exception goes on from that call (with METRALE_EXPECTED: is `error::cause()`).
//
// Header only; link with the library. Both ways of errors may be used in one program, in different files.
#ifndef METRALE_HPP
#define METRALE_HPP

#include "metrale/base.hpp"
#include "metrale/runtime.hpp"
#include "metrale/source.hpp"
#include "metrale/model.hpp"
#include "metrale/text.hpp"
#include "metrale/choose.hpp"
#include "metrale/seq.hpp"
#include "metrale/batch.hpp"

#endif
