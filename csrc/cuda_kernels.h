// Which CUDA kernels this build has for a device. Plain C++; setup.py defines MLA_PREFILL_BACKENDS ("cpu,sm90,sm80")
// and MLA_PREFILL_CUDA_ARCHS ("80,86,89,90": of the portable kernels, the last one as PTX for later devices too).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace mla_prefill::cuda {

// The faster one first.
enum class Kernel { kSm90, kSm80 };

inline const char* name_of(Kernel kernel) { return kernel == Kernel::kSm90 ? "sm90" : "sm80"; }

inline std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream stream(list);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

// Whether machine code for one of `archs` runs on such a device, or PTX of the last of them becomes code for it.
// Machine code runs on devices of the same major number and its own or a higher minor one, PTX on all later ones.
inline bool has_code(const std::string& archs, int major, int minor) {
  const int device = major * 10 + minor;
  int last = 0;
  for (const std::string& arch : split(archs)) {
    last = std::atoi(arch.c_str());
    if (last / 10 == major && last <= device) return true;
  }
  return last != 0 && last <= device;
}

// The compute capabilities that `archs` are for: "8.0, 8.6, 9.0 and above".
inline std::string capabilities_of(const std::string& archs) {
  std::string text;
  for (const std::string& arch : split(archs)) {
    text += (text.empty() ? "" : ", ") + arch.substr(0, arch.size() - 1) + "." + arch.back();
  }
  return text + " and above";
}

// The kernels to try on a device, in order, or why there is none.
struct Kernels {
  std::vector<Kernel> kernels;
  std::string reason;
};

// `forced` is MLA_PREFILL_FORCE: the name of the only kernel to try; empty: none is.
inline Kernels kernels_for(const std::string& backends, const std::string& archs, const std::string& forced, int major,
                           int minor) {
  std::string names;
  std::vector<Kernel> wanted;
  for (const std::string& backend : split(backends)) {
    for (const Kernel kernel : {Kernel::kSm90, Kernel::kSm80}) {
      if (backend != name_of(kernel)) continue;
      names += (names.empty() ? "" : " or ") + backend;
      if (forced.empty() || forced == backend) wanted.push_back(kernel);
    }
  }
  if (wanted.empty() && !forced.empty()) {
    return {{}, "MLA_PREFILL_FORCE: expected " + (names.empty() ? "nothing" : names) + ", got " + forced};
  }
  std::sort(wanted.begin(), wanted.end());
  Kernels found;
  std::string expected;
  for (const Kernel kernel : wanted) {
    const bool is_hopper = kernel == Kernel::kSm90;
    expected += (expected.empty() ? "" : " or ") +
                (is_hopper ? "9.0 (sm90 kernel)" : capabilities_of(archs) + " (sm80 kernel)");
    if (is_hopper ? major == 9 && minor == 0 : has_code(archs, major, minor)) found.kernels.push_back(kernel);
  }
  if (found.kernels.empty()) {
    found.reason = "device: expected compute capability " +
                   (expected.empty() ? "of none (no CUDA kernel is built)" : expected) + ", got " +
                   std::to_string(major) + "." + std::to_string(minor);
  }
  return found;
}

inline std::string forced_kernel() {
  const char* forced = std::getenv("MLA_PREFILL_FORCE");
  return forced ? forced : "";
}

}  // namespace mla_prefill::cuda
