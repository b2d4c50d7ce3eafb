// Before the page is drawn, so that it does not flash in the other theme.
"use strict";
{
  const chosen = localStorage.getItem("lox-theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
}
