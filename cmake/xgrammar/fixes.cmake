# Makes the texts that XGrammar 0.2.9 allows follow their schema everywhere. sources: the folder of its files.

# replace(FILE FROM TO): replaces a part of a file's code that must be there once.
function(replace file from to)
  file(READ ${sources}/cpp/${file} code)
  string(FIND "${code}" "${from}" first)
  string(FIND "${code}" "${from}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "${file} does not have once: ${from}")
  endif()
  string(REPLACE "${from}" "${to}" code "${code}")
  file(WRITE ${sources}/cpp/${file} "${code}")
endfunction()

# A string of a limited length may have control characters, which JSON must escape.
replace(json_schema_converter.cc
  "builder_.AddCharacterClass({{'\"', '\"'}, {" "builder_.AddCharacterClass({{0, 0x1f}, {'\"', '\"'}, {")
# A pattern that the automaton does not take may have quotation marks without escapes.
set(rest "  // Keep regex conversion independent. Only")
replace(json_schema_converter.cc "${rest}"
  "  if (json_string) XGRAMMAR_LOG(FATAL) << \"the pattern \" << regex << \" is not supported\";\n${rest}")
# A further property may have the name of a described one, written with an escape.
set(rest "  for (const auto& [character, child] : node.children) {\n    choices.push_back")
replace(json_schema_converter.cc
  "  choices.push_back(Sequence({ByteString(\"\\\\\"), RuleRef(kBasicEscape), RuleRef(kBasicStringSub)}));\n${rest}" "${rest}")
# A text may have the bytes of surrogates, which are not UTF-8.
set(begin "void AddPackedUTF8RangeEdges(FSM& fsm, int from, int to, uint32_t min, uint32_t max) {\n")
replace(fsm_builder.cc "${begin}" "${begin}  constexpr uint32_t kFirst = 0xEDA080, kLast = 0xEDBFBF;
  if (min <= kLast && max >= kFirst) {
    if (min < kFirst) AddPackedUTF8RangeEdges(fsm, from, to, min, 0xED9FBF);
    if (max > kLast) AddPackedUTF8RangeEdges(fsm, from, to, 0xEE8080, max);
    return;
  }
")
# A range of characters may have bytes that are longer than UTF-8 allows.
replace(fsm_builder.cc "      AddPackedUTF8RangeEdges(
          *fsm, from, to, CodepointToPackedUTF8(multi_byte_low), CodepointToPackedUTF8(high)
      );
" "      for (const uint32_t longest : {0x7FFu, 0xFFFFu, 0x10FFFFu}) {
        if (multi_byte_low > longest || multi_byte_low > high) continue;
        const uint32_t last = std::min<uint32_t>(high, longest);
        AddPackedUTF8RangeEdges(*fsm, from, to, CodepointToPackedUTF8(multi_byte_low), CodepointToPackedUTF8(last));
        multi_byte_low = last + 1;
      }
")
# A number may have an exponent that is too large for float64, which readers of JSON refuse.
set(rest "}\n       )}\n  );\n  // Note: The format must be")
replace(json_schema_converter.cc "            one_or_more_digits${rest}"
  "            Repeat(rule_name + \"_exponent\", builder_.AddCharacterClass({{'0', '9'}}), 1, 2)${rest}")
