// Formulas are unicode in code spans. Where a page does use TeX, MathJax is fetched, and only there.
if (document.querySelector(".arithmatex")) {
  window.MathJax = {
    tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
    options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
  };
  const script = document.createElement("script");
  script.src = "https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-mml-chtml.js";
  script.async = true;
  document.head.appendChild(script);
}
